"""Adds remedies to error messages, in the words of the library or of the command line.

The remedies of `producer doctor` are in producer/cli/doctor/ and producer/stalls.py, those of
failed requests in gateway/page/requests.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from contract.errors import Remedy, WarmqError

LIBRARY_REMEDIES: dict[Remedy, str] = {
    "collect_earlier": "submit it again, and collect earlier or raise WARMQ_RESULT_TTL_S",
    "follow_results": "results(follow=True) waits until all have ended",
    "give_delimiter": "give delimiter={delimiter!r}",
    "name_error_file": "give the error file {errors_file}, or {start_anew}",
    "new_batch_id": "use another batch_id",
    "other_tokenizer": "name a model's folder, or a model of the Hugging Face hub",
    "read_new_batch": "the results are of two batches: begin again with the new one",
    "report": "if nothing else removes keys there, please report it; submit it again under another "
    "batch_id",
    "resume_submit": "the same submit with batch_id={batch_id!r} goes on where it stopped",
    "same_options": "use the same ones, or another batch_id",
    "submit_again": "submit it again if you still want its results",
    "submit_from_start": "the same submit with batch_id={batch_id!r} submits it from its beginning",
}
COMMAND_REMEDIES: dict[Remedy, str] = LIBRARY_REMEDIES | {
    "collect_earlier": "submit the file again, and collect earlier or raise WARMQ_RESULT_TTL_S",
    "follow_results": "`producer results {batch_id} --follow` waits until all have ended",
    "give_delimiter": "give --delimiter '{delimiter}'",
    "name_error_file": "give --errors {errors_file}, or {start_anew}",
    "new_batch_id": "use another --batch-id",
    "other_tokenizer": "name a model's folder, or a model of the Hugging Face hub, with "
    "--tokenizer; or give --estimate",
    "report": "if nothing else removes keys there, please report it; submit the file again under "
    "another --batch-id",
    "resume_submit": "the same `producer submit` with --batch-id {batch_id} goes on where it "
    "stopped",
    "same_options": "use the same ones, or another --batch-id",
    "submit_again": "submit the file again if you still want its results",
    "submit_from_start": "the same command with --batch-id {batch_id} submits it from its "
    "beginning",
}


def with_remedy(error: WarmqError, phrases: dict[Remedy, str] = COMMAND_REMEDIES) -> str:
    """Return an error's message with its remedy."""
    if error.remedy is None:
        return error.message
    return f"{error.message}; {phrases[error.remedy].format_map(error.facts)}"


@contextmanager
def add_remedies() -> Iterator[None]:
    """Add the library's remedy to the message of an error that the block raises."""
    try:
        yield
    except WarmqError as error:
        error.message = with_remedy(error, LIBRARY_REMEDIES)
        error.remedy = None
        error.args = (error.message,)
        raise
