"""What to do about an error, in the words of this command line."""

from __future__ import annotations

from contract.errors import Remedy, WarmqError

REMEDIES: dict[Remedy, str] = {
    "collect_earlier": "submit the file again, and collect earlier or raise WARMQ_RESULT_TTL_S",
    "follow_results": "`producer results {batch_id} --follow` waits until all have ended",
    "name_error_file": "give --errors {errors_file}, or {start_anew}",
    "new_batch_id": "use another --batch-id",
    "read_new_batch": "what was read is not from one batch: begin again with the new one",
    "report": "if nothing else removes keys there, please report it; submit the file again "
    "under another --batch-id",
    "resume_submit": "the same `producer submit` with --batch-id {batch_id} goes on where it "
    "stopped",
    "same_options": "use the same ones, or another --batch-id",
    "submit_again": "submit the file again if you still want its results",
    "submit_from_start": "the same command with --batch-id {batch_id} submits it from its "
    "beginning",
}


def with_remedy(error: WarmqError) -> str:
    """Return what is wrong and what to do about it."""
    if error.remedy is None:
        return error.message
    return f"{error.message}; {REMEDIES[error.remedy].format_map(error.facts)}"
