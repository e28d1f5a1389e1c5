"""Pages of batches: a list with progress and time left, one batch, cancel, retry."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from typing import Any

import orjson
from starlette.background import BackgroundTask
from starlette.responses import Response

from contract.batch import Batch as QueueBatch
from contract.redis.history import DAY, HistoryReads, Minute
from gateway.batches.api import batches as api
from gateway.batches.api import virtual_files
from gateway.batches.api.protocol import ERRORS, OUTPUT, PARTIAL, part_ids, shown
from gateway.batches.api.record import ENDED, BatchRecord, decode
from gateway.files.files import FileRecord, Files, new_record, save_file
from gateway.files.multipart import ReceivedForm
from gateway.files.routes import content
from gateway.http.errors import ApiError, not_found
from gateway.http.json_api import new_id
from gateway.http.services import Services
from gateway.page.file_reading import ReadGuard, TooLong
from gateway.page.requests import failures, sample, workers_of
from gateway.page.view import View
from gateway.redis.batch_views import BatchView, BatchViews
from gateway.redis.request_reads import RequestReads, RunningRequest
from producer.input.reader import Input
from producer.time_left import Pace, pace_of, seconds_left

#: Batches on one page, and most running requests that are shown for one batch.
PAGE, MAX_RUNNING = 25, 12
#: Histograms on the page of a batch: title, and name in a `Sample`.
FIGURES = (
    ("Time in the queue", "queued_s"),
    ("Time in the engine", "engine_s"),
    ("Answer tokens", "tokens"),
)
_TOO_LARGE = "the batch's files are too large for this page; submit its failed lines as a new file"
_GONE = "the batch's input or error file is deleted; submit its failed lines as a new file"
#: Queue -> its minutes of the last day or less, oldest first.
History = Mapping[str, Sequence[Minute]]


def row_of(view: BatchView, now: float) -> dict[str, Any] | None:
    """Return a batch as a row of the list; None if Anthropic's API made it.

    The rate is the mean since the batch began. `from_history` returns further values for a row.
    """
    batch = shown(view)
    if batch is None:
        return None
    if isinstance(view.source, QueueBatch):
        expected_s = view.source.expected_s
        queues = [view.source.fields.get("queue", "")]
    else:  # its queue batches run concurrently, so the longest counts
        record = decode(view.source.document)
        expected = (record.expected_s, *(part.expected_s for part in view.parts))
        expected_s = max(filter(None, expected), default=None)
        queues = sorted({part.queue for part in record.parts})
    counts, ended = batch.request_counts, batch.status in ENDED
    done = counts.completed + counts.failed
    ended_at = (
        batch.completed_at or batch.failed_at or batch.expired_at or batch.cancelled_at
        if ended else None
    )  # fmt: skip
    # Both times are in whole seconds: a batch that took less than one counts as one.
    seconds = max(1.0, (ended_at or now) - (batch.in_progress_at or batch.created_at))
    return {
        "id": batch.id,
        "status": batch.status,
        "ended": ended,
        "model": batch.model if isinstance(batch.model, str) else "",
        "input": (batch.metadata or {}).get("input") or batch.input_file_id,
        "input_file_id": batch.input_file_id,
        "total": counts.total,
        "completed": counts.completed,
        "failed": counts.failed,
        "done": done,
        "created_at": batch.created_at,
        "ended_at": ended_at,
        "seconds": seconds,
        "expires_at": batch.expires_at,
        "rate": done / seconds if done else None,
        "tokens_in": batch.usage.input_tokens,
        "tokens_out": batch.usage.output_tokens,
        "cached": batch.usage.input_tokens_details.cached_tokens,
        "expected_s": expected_s,
        "queues": queues,
        "error_file_id": batch.error_file_id,
    }


def batch_rows(view: View, after: str, limit: int) -> tuple[list[dict[str, Any]], bool]:
    """Return a page's rows, and whether more rows follow."""
    reads = BatchViews.using(view.services.batches)
    found = reads.page(view.caller.tenant, after=after, limit=limit)
    if found is None:
        raise not_found("batch", after)
    now = time.time()
    rows = [row for one in found.batches if (row := row_of(one, now)) is not None]
    complete(view.services, rows)
    return rows, found.has_more


def complete(services: Services, rows: list[dict[str, Any]]) -> None:
    """Add to rows their input files' names, if these exist, and `from_history`."""
    ids = [row["input_file_id"] for row in rows]
    history = history_of(services, rows)
    for row, stored in zip(rows, services.objects.get_many("file", ids), strict=True):
        if stored is not None:
            row["input"] = str(orjson.loads(stored.document).get("filename") or row["input"])
        row.update(from_history(row, history))


def batches(view: View) -> Response:
    """Show a page of the caller's batches."""
    rows, more = batch_rows(view, view.query.get("after", "")[:200], PAGE)
    return view.page("batches.html", rows=rows, more=more, watched=watched(rows))


def watched(rows: list[dict[str, Any]]) -> str:
    """Return the ids of batches that may still change, for the live stream."""
    return ",".join(row["id"] for row in rows if not row["ended"])


def history_of(services: Services, rows: list[dict[str, Any]]) -> History:
    """Return the history of the queues of some rows, since their oldest batch was created."""
    queues = {queue for row in rows for queue in row["queues"]}
    since = min((row["created_at"] for row in rows), default=0)
    minutes = min(DAY, max(2, int(time.time() - since) // 60 + 2))
    reads = HistoryReads.using(services.batches)
    return {queue: reads.day([queue], minutes) for queue in sorted(queues)}


def from_history(row: Mapping[str, Any], history: History) -> dict[str, float | None]:
    """Return a row's `cached_share`, from 0 to 1, and `left_s`, the seconds until it ends."""
    left = None if row["ended"] else _left_s(row, history)
    return {"cached_share": _cached_share(row, history), "left_s": left}


def _left_s(row: Mapping[str, Any], history: History) -> float | None:
    """Return the seconds until a batch ends; its queue batches run concurrently."""
    paces = [pace for queue in row["queues"] if (pace := pace_of(history.get(queue, ())))]
    if not paces:
        return None
    slots = sum(pace.slots for pace in paces)
    pace = Pace(sum(one.tokens_per_s for one in paces) / slots, slots)
    return seconds_left(pace, row["total"], row["done"], row["tokens_in"] + row["tokens_out"])


def _cached_share(row: Mapping[str, Any], history: History) -> float | None:
    """Return the share of prompt tokens that came from the prefix cache; None if unknown.

    Answers have this number only if vLLM runs with `--enable-prompt-tokens-details`, and its sum is
    known once the batch has ended. Otherwise this is the share of the batch's queues while it ran.
    """
    if row["cached"] and row["tokens_in"]:
        return float(row["cached"] / row["tokens_in"])
    first, last = row["created_at"] // 60, (row["ended_at"] or time.time()) // 60
    found = [m for q in row["queues"] for m in history.get(q, ()) if first <= m.minute <= last]
    read = sum(minute.prompt_tokens for minute in found)
    return min(1.0, sum(minute.cached_tokens for minute in found) / read) if read else None


def batch(view: View) -> Response:
    """Show a batch, with a sample of the requests that ended last."""
    services, batch_id = view.services, view.request.path_params["batch_id"]
    found = api.view_of(services, view.caller, batch_id)
    row = row_of(found, time.time())
    if row is None:
        raise not_found("batch", batch_id)
    complete(services, [row])
    parts = [part for part in services.batches.states(part_ids(found)) if part is not None]
    ended_last = sample(services, parts)
    error_file = None if isinstance(found.source, QueueBatch) else row["error_file_id"]
    return view.page(
        "batch.html",
        row=row,
        batch=shown(found),
        sample=ended_last,
        failed=failures(services, parts, ended_last, error_file),
        figures=FIGURES,
        running=[] if row["ended"] else _running(services, parts),
        retriable=row["ended"] and row["failed"] > 0 and row["status"] != "failed",
        watched="" if row["ended"] else batch_id,
    )


def _running(services: Services, parts: list[QueueBatch]) -> list[RunningRequest]:
    reads, workers = RequestReads.using(services.batches), workers_of(services)
    found = (one for part in parts for one in reads.running(part, workers, MAX_RUNNING))
    return [one for one in islice(found, MAX_RUNNING) if one.custom_id]


def cancel(view: View) -> Response:
    """Begin to cancel a batch."""
    batch_id = view.request.path_params["batch_id"]
    state, found = api.cancel(view.services, view.caller, batch_id)
    background = None
    if isinstance(found.source, QueueBatch) and state.status == "cancelling":
        background = BackgroundTask(view.services.batches.cancel, found.source)
    return view.to(f"/ui/batches/{batch_id}", background, notice="cancelled")


def download(view: View) -> Response:
    """Send a batch's answers or errors; while the batch runs, those so far."""
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


def retry(view: View, *, guard: ReadGuard) -> Response:
    """Run failed lines again.

    Lines of `producer submit` run in their batch. Lines of a batch made over HTTP run as a new
    batch, because the files of a batch that has ended do not change.
    """
    services, batch_id = view.services, view.request.path_params["batch_id"]
    found = api.view_of(services, view.caller, batch_id)
    if isinstance(found.source, QueueBatch):
        count = services.batches.retry(found.source, ("failed", "expired", "cancelled"))
        return view.to(f"/ui/batches/{batch_id}", notice="retried", n=count)
    record = decode(found.source.document)
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
    made = api.create(services, view.caller, orjson.dumps(body), "")
    return view.to(f"/ui/batches/{made.id}", notice="retried", n=count)


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
        for number, line in _lines_of(services, source.id, guard):
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


def _lines_of(services: Services, file_id: str, guard: ReadGuard) -> Iterator[tuple[int, bytes]]:
    """Yield a file's lines with the same numbers as when it was queued."""
    longest = services.settings.max_line_bytes
    with services.store.local(file_id) as path, closing(Input(str(path), watch=guard)) as source:
        for chunk in source.chunks(None, longest):
            yield from chunk.lines


def _line_numbers(services: Services, file_id: str, guard: ReadGuard) -> Iterator[int]:
    """Yield the input line numbers of the lines of a batch's error file."""
    for _, line in _lines_of(services, file_id, guard):
        error = orjson.loads(line) if line else {}
        number = (error.get("warmq") or {}).get("line") or (error.get("error") or {}).get("line")
        if isinstance(number, int):
            yield number
