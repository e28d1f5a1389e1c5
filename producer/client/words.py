"""What a program can do about an error, in the words of the library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from contract.errors import Remedy, WarmqError

REMEDIES: dict[Remedy, str] = {
    "collect_earlier": "submit it again, and collect earlier or raise WARMQ_RESULT_TTL_S",
    "follow_results": "results(follow=True) waits until all have ended",
    "name_error_file": "give the error file {errors_file}, or {start_anew}",
    "new_batch_id": "use another batch_id",
    "other_tokenizer": "name a model's folder, or a model of the Hugging Face hub",
    "read_new_batch": "what was read is not from one batch: begin again with the new one",
    "report": "if nothing else removes keys there, please report it; submit it again under another "
    "batch_id",
    "resume_submit": "the same submit with batch_id={batch_id!r} goes on where it stopped",
    "same_options": "use the same ones, or another batch_id",
    "submit_again": "submit it again if you still want its results",
    "submit_from_start": "the same submit with batch_id={batch_id!r} submits it from its beginning",
}


@contextmanager
def worded() -> Iterator[None]:
    """Add to an error what to do about it."""
    try:
        yield
    except WarmqError as error:
        if error.remedy is not None:
            error.message += f"; {REMEDIES[error.remedy].format_map(error.facts)}"
            error.remedy = None
            error.args = (error.message,)
        raise
