"""One batch: how far it is, how its requests were served, which failed and what to do; its failed
lines, when it has ended, as a batch of their own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from typing import Any

import orjson
from starlette.background import BackgroundTask
from starlette.responses import Response

from contract.batch import Batch as QueueBatch
from gateway.batches.api import batches as api
from gateway.batches.api import virtual_files
from gateway.batches.api.protocol import ERRORS, OUTPUT, PARTIAL, part_ids, shown
from gateway.batches.api.record import ENDED, BatchRecord, decode
from gateway.files.files import Files, new_record, save_file
from gateway.files.multipart import ReceivedForm
from gateway.files.routes import content
from gateway.http.errors import ApiError, not_found
from gateway.http.json_api import new_id
from gateway.http.services import Services
from gateway.page.batches import by_rings, name_inputs, rings_of, row_of
from gateway.page.requests import Sample, failures, sample, workers_of
from gateway.page.view import View
from gateway.page.whole_files import Reading, TooLong
from gateway.redis.request_reads import RequestReads, RunningRequest
from producer.input.reader import Input

#: Requests that run now, which are shown.
RUNNING = 12


def batch(view: View) -> Response:
    """Show a batch; what is shown of its requests is a sample of those that ended last."""
    batch_id = view.request.path_params["batch_id"]
    found = api.view_of(view.services, view.caller, batch_id)
    row = row_of(found, time.time())
    if row is None:
        raise not_found("batch", batch_id)
    name_inputs(view, [row])
    row.update(by_rings(row, rings_of(view.services, [row])))
    parts = [part for part in view.services.batches.states(part_ids(found)) if part is not None]
    taken = sample(view.services, parts)
    of_queue = isinstance(found.source, QueueBatch)
    error_file = None if of_queue else row["error_file_id"]
    return view.page(
        "batch.html",
        row=row,
        batch=shown(found),
        sample=taken,
        failed=_by_code(failures(view.services, parts, taken, error_file)),
        figures=_figures(taken),
        running=[] if row["ended"] else _running(view.services, parts),
        retriable=row["ended"] and row["failed"] > 0 and row["status"] != "failed",
        now_watched="" if row["ended"] else batch_id,
    )


def _by_code(failed: list[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return failed requests by their codes, the code of most of them first."""
    found: dict[str, list[dict[str, Any]]] = {}
    for one in failed:
        found.setdefault(one["code"], []).append(one)
    return sorted(found.items(), key=lambda pair: -len(pair[1]))


def _figures(taken: Sample) -> list[tuple[str, list[tuple[float, float, int]]]]:
    return [
        ("Waited in the queue", taken.histogram("queued_s")),
        ("Time in the engine", taken.histogram("engine_s")),
        ("Tokens of the answers", taken.histogram("tokens")),
    ]


def cancel(view: View) -> Response:
    """Begin to cancel a batch."""
    batch_id = view.request.path_params["batch_id"]
    shown_batch, found = api.cancel(view.services, view.caller, batch_id)
    background = None
    if isinstance(found.source, QueueBatch) and shown_batch.status == "cancelling":
        background = BackgroundTask(view.services.batches.cancel, found.source)
    return view.to(f"/ui/batches/{batch_id}", background, told="cancelled")


def _running(services: Services, parts: list[QueueBatch]) -> list[RunningRequest]:
    looks, workers = RequestReads.using(services.batches), workers_of(services)
    found = (one for part in parts for one in looks.running(part, workers, RUNNING))
    return [one for one in islice(found, RUNNING) if one.custom_id]


def download(view: View) -> Response:
    """Send a batch's answers, its errors, or what there is so far."""
    batch_id, kind = (view.request.path_params[name] for name in ("batch_id", "kind"))
    found = shown(api.view_of(view.services, view.caller, batch_id), partial=True)
    ids = {"answers": found.output_file_id, "errors": found.error_file_id} if found else {}
    file_id = ids.get(kind)
    if not file_id:
        raise ApiError(404, f"batch {batch_id} has no {kind[:20]} (yet)", code="file_not_found")
    if file_id.startswith((OUTPUT, ERRORS, PARTIAL)):
        return virtual_files.content(view.services, view.caller, file_id, 0)
    record = Files(view.services).get(view.caller.tenant, file_id)
    if record is None or view.services.store.size(file_id) is None:
        raise not_found("file", file_id)
    return content(view.services.store, record, view.request.headers)


_TOO_LARGE = "the batch's files are too large for this page: submit its failed lines as a new file"
_GONE = "the batch's file or its error file is gone: submit its failed lines as a new file"


def retry(view: View, *, reading: Reading) -> Response:
    """Run failed lines again: those of `producer submit` in their batch, others as a new one,
    for the files of a batch that has ended do not change any more."""
    batch_id = view.request.path_params["batch_id"]
    found = api.view_of(view.services, view.caller, batch_id)
    if isinstance(found.source, QueueBatch):
        outcomes = ("failed", "expired", "cancelled")
        count = view.services.batches.retry(found.source, outcomes)
        return view.to(f"/ui/batches/{batch_id}", told="retried", n=count)
    record = decode(found.source.document)
    if record.status not in ENDED:
        raise ApiError(400, f"batch {batch_id} still runs; its failed lines can be retried then")
    reading.begin()
    try:
        made, count = _again(view, record, reading)
    except TooLong:
        raise ApiError(413, _TOO_LARGE, code="file_too_large") from None
    return view.to(f"/ui/batches/{made}", told="retried", n=count)


def _again(view: View, record: BatchRecord, reading: Reading) -> tuple[str, int]:
    services, caller = view.services, view.caller
    files = Files(services)
    source = files.get(caller.tenant, record.input_file_id)
    errors = files.get(caller.tenant, record.error_file_id or "")
    if source is None or errors is None or services.store.size(source.id) is None:
        raise ApiError(404, _GONE, code="file_not_found")
    numbers = set(_failed_lines(view, errors.id, reading))
    file_id, incoming, count = new_id("file-"), ReceivedForm(), 0
    incoming.filename = f"failed-lines-of-{record.id}.jsonl"
    with services.store.write(file_id) as writer:
        for number, line in _lines_of(services, source.id, reading):
            if line and number in numbers:  # not one that was too long
                written = line.rstrip(b"\r\n") + b"\n"
                writer.write(written)
                incoming.size += len(written)
                count += 1
        if not count:
            raise ApiError(400, f"batch {record.id} has no failed line that could run again")
        kept = save_file(
            services,
            caller,
            writer,
            new_record(file_id, caller, incoming, "batch", None, int(services.clock.now())),
        )
    asked: dict[str, object] = {
        "input_file_id": kept.id, "endpoint": record.endpoint, "order": record.order,
        "completion_window": record.completion_window, "once": record.once,
        "priority": max(record.priority, caller.highest_priority),
        "metadata": {"failed_lines_of": record.id},
    }  # fmt: skip
    if record.output_expires_after_s is not None:
        asked["output_expires_after"] = {
            "anchor": "created_at", "seconds": record.output_expires_after_s
        }  # fmt: skip
    return api.create(services, caller, orjson.dumps(asked), "").id, count


def _lines_of(services: Services, file_id: str, reading: Reading) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file with their numbers, as they were read when it was queued."""
    longest = services.settings.max_line_bytes
    with services.store.local(file_id) as path, closing(Input(str(path), watch=reading)) as source:
        for chunk in source.chunks(None, longest):
            yield from chunk.lines


def _failed_lines(view: View, file_id: str, reading: Reading) -> list[int]:
    """Return the numbers, in the batch's file, of the lines of an error file."""
    numbers = []
    for _, line in _lines_of(view.services, file_id, reading):
        told = orjson.loads(line) if line else {}
        number = (told.get("warmq") or {}).get("line") or (told.get("error") or {}).get("line")
        if isinstance(number, int):
            numbers.append(number)
    return numbers
