"""Runs failed requests of a batch again, from its page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson
from starlette.responses import Response

from contract.batch import Batch as QueueBatch
from contract.failures import is_wrong
from gateway.batches.api import batches as api
from gateway.batches.api.record import ENDED, BatchRecord, decode
from gateway.files.files import FileRecord, Files, new_record, save_file
from gateway.files.multipart import ReceivedForm
from gateway.http.errors import ApiError
from gateway.http.json_api import new_id
from gateway.http.services import Services
from gateway.page.failed import OUTCOMES
from gateway.page.file_reading import ReadGuard, TooLong, lines_of_file
from gateway.page.view import View

_TOO_LARGE = "the batch's files are too large for this page; submit its failed lines as a new file"
_GONE = "the batch's input or error file is deleted; submit its failed lines as a new file"


def retry(view: View, *, guard: ReadGuard) -> Response:
    """Run failed lines again.

    Lines of `producer submit` run in their batch. Lines of a batch made over HTTP run as a new
    batch, because the files of a batch that has ended do not change.
    """
    services, batch_id = view.services, view.request.path_params["batch_id"]
    batch_view = api.view_of(services, view.caller, batch_id)
    if isinstance(batch_view.source, QueueBatch):
        all_of_them = tuple(name for names in OUTCOMES.values() for name in names)
        outcomes = OUTCOMES.get(view.form.get("which", ""), all_of_them)
        count = services.batches.retry(batch_view.source, outcomes)
        return view.redirect(f"/ui/batches/{batch_id}", notice="retried", n=count)
    record = decode(batch_view.source.document)
    if record.status not in ENDED:
        raise ApiError(400, f"batch {batch_id} is still running; retry when it has ended")
    guard.start()
    try:
        file, count = _failed_lines_file(view, record, guard)
    except TooLong:
        raise ApiError(413, _TOO_LARGE, code="file_too_large") from None
    body: dict[str, object] = {
        "input_file_id": file.id, "endpoint": record.endpoint, "order": record.order,
        "completion_window": record.completion_window, "once": record.once,
        "priority": max(record.priority, view.caller.highest_priority),
        "metadata": {"failed_lines_of": record.id},
    }  # fmt: skip
    if (seconds := record.output_expires_after_s) is not None:
        body["output_expires_after"] = {"anchor": "created_at", "seconds": seconds}
    new_batch = api.create(services, view.caller, orjson.dumps(body), "")
    return view.redirect(f"/ui/batches/{new_batch.id}", notice="retried", n=count)


def _failed_lines_file(view: View, record: BatchRecord, guard: ReadGuard) -> tuple[FileRecord, int]:
    """Store a batch's failed lines as a new file; return it and their number."""
    services, caller = view.services, view.caller
    files = Files(services)
    source = files.get(caller.tenant, record.input_file_id)
    errors = files.get(caller.tenant, record.error_file_id or "")
    if source is None or errors is None or services.store.size(source.id) is None:
        raise ApiError(404, _GONE, code="file_not_found")
    numbers = set(_line_numbers(services, errors.id, guard))
    file_id, incoming, count = new_id("file-"), ReceivedForm(), 0
    incoming.filename = f"failed-lines-of-{record.id}.jsonl"
    with services.store.write(file_id) as writer:
        for number, line in lines_of_file(services, source.id, guard):
            if line and number in numbers:  # the reader returns a line that was too long as b''
                written = line.rstrip(b"\r\n") + b"\n"
                writer.write(written)
                incoming.size += len(written)
                count += 1
        if not count:
            raise ApiError(400, f"batch {record.id} has no failed line that could run again")
        now = int(services.clock.now())
        new = new_record(file_id, caller, incoming, "batch", None, now)
        return save_file(services, caller, writer, new), count


def _line_numbers(services: Services, file_id: str, guard: ReadGuard) -> Iterator[int]:
    """Yield the input line numbers in a batch's error file, without lines that are wrong."""
    for _, line in lines_of_file(services, file_id, guard):
        error_line: dict[str, Any] = orjson.loads(line) if line else {}
        error = error_line.get("error") or (
            (error_line.get("response") or {}).get("body") or {}
        ).get("error")
        number = (error_line.get("warmq") or {}).get("line") or (error or {}).get("line")
        if isinstance(number, int) and not is_wrong((error or {}).get("code")):
            yield number
