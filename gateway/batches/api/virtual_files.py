"""Files that are nowhere: their content is read from the queue when it is asked for.

`file-out-<batch>` and `file-err-<batch>` are those of a batch of `producer submit`, in the order of
its input; `file-partial-<batch>` has what has ended so far of any batch, successes and failures, in
the order in which it ended. Their ids cannot be those of other files, which are hexadecimal.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from functools import cache
from itertools import chain

from anyio import CapacityLimiter, to_thread
from starlette.responses import RedirectResponse, Response, StreamingResponse

from contract.batch import Batch as QueueBatch
from contract.index import entry_request_id, read_ending
from contract.redis.batches import BatchStore
from contract.results import ResultLine, result_line, stored_line
from gateway.batches.api.batches import find
from gateway.batches.api.output_lines import in_chunks, openai_line
from gateway.batches.api.protocol import ERRORS, OUTPUT, PARTIAL, Batch, part_ids
from gateway.batches.api.record import ENDED
from gateway.files.protocol import OUTPUT_PURPOSE, File
from gateway.http.caller import Caller
from gateway.http.errors import ApiError, not_found
from gateway.http.services import Services
from gateway.redis.batch_views import BatchView, PartialOrder, Segment
from producer.batch_watch import BatchChanged
from producer.collect.collect import Collector

#: What their ids look like.
ID = rf"(?:{OUTPUT}|{ERRORS}|{PARTIAL})[A-Za-z0-9][A-Za-z0-9._-]{{0,127}}"
_NAMES = {OUTPUT: "output", ERRORS: "errors", PARTIAL: "partial"}
#: Contents for which lines are read at a time. This process has online requests to answer: with a
#: thread for each, many downloads would take its CPU, and the threads that others wait for.
AT_ONCE = 1
#: Endings read at once.
ENDINGS = 100


def _find(services: Services, caller: Caller, file_id: str) -> tuple[str, BatchView, Batch]:
    """Return the kind of a file, and the batch it belongs to.

    Raises:
        ApiError: 404, if the caller has no such batch, or it has no such file (yet).
    """
    kind = next(kind for kind in _NAMES if file_id.startswith(kind))
    try:
        batch, view = find(services, caller, file_id.removeprefix(kind))
    except ApiError:
        raise not_found("file", file_id) from None
    if kind != PARTIAL and file_id not in (batch.output_file_id, batch.error_file_id):
        raise not_found("file", file_id)
    return kind, view, batch


def file_object(services: Services, caller: Caller, file_id: str) -> File:
    """Return the File of an id. Its `bytes` are 0: nobody has counted them."""
    kind, _, batch = _find(services, caller, file_id)
    return File(
        id=file_id,
        bytes=0,
        created_at=batch.created_at,
        filename=f"{batch.id}_{_NAMES[kind]}.jsonl",
        purpose=OUTPUT_PURPOSE,
    )


def content(services: Services, caller: Caller, file_id: str, offset: int) -> Response:
    """Return the lines of a file, in OpenAI's form, streamed as they are read.

    Raises:
        ApiError: as long as nothing was sent; what happens later breaks the connection, so that no
            part of a file looks like all of it.
    """
    kind, view, batch = _find(services, caller, file_id)
    headers = {
        "content-disposition": f'attachment; filename="{batch.id}_{_NAMES[kind]}.jsonl"',
        "x-content-type-options": "nosniff",
    }
    if kind == PARTIAL:
        return _partial(services, view, batch, offset, headers)
    if not isinstance(view.source, QueueBatch):
        raise not_found("file", file_id)
    collector = Collector(services.batches, view.source, follow=False)

    def lines() -> Iterator[bytes | None]:
        for line in collector.lines("input"):
            yield openai_line(line) if line.failed == (kind == ERRORS) else None
        if kind == OUTPUT or not batch.output_file_id:
            collector.mark_collected()

    return _streamed(lines(), headers)


def _partial(
    services: Services, view: BatchView, batch: Batch, offset: int, headers: dict[str, str]
) -> Response:
    """Return what has ended so far; after the batch's end, for as long as the queue has it."""
    parts = [services.batches.batch(batch_id) for batch_id in part_ids(view)]
    there = [part for part in parts if part is not None and part.status != "deleting"]
    if len(there) < len(parts):
        if batch.status in ENDED:
            return _ended(batch, offset)
        there = []  # not all are queued yet; what each is in the order depends on all
    headers["x-incomplete"] = str(batch.status not in ENDED).lower()
    last = 0
    segments: list[Segment] = []
    if there:
        order = PartialOrder.using(services.batches)
        ttl_ms = services.settings.result_ttl_ms
        last, segments = order.segments(batch.id, there, offset, ttl_ms)
    headers["x-last-line"] = str(max(last, offset))
    return _streamed(map(openai_line, _endings(services.batches, segments, offset)), headers)


def _ended(batch: Batch, offset: int) -> Response:
    """Answer for a batch whose requests the queue has no more."""
    final = batch.output_file_id or batch.error_file_id
    if final and offset == 0:
        return RedirectResponse(f"/v1/files/{final}/content", 307)
    told = f"batch {batch.id} has ended: its results are in its output_file_id and error_file_id"
    raise ApiError(404, told, code="batch_ended", param="offset")


def _streamed(lines: Iterator[bytes | None], headers: dict[str, str]) -> Response:
    chunks = in_chunks(lines)
    try:
        first = next(chunks, b"")
    except BatchChanged as error:
        raise ApiError(404, error.message, code="file_not_found", param="id") from None
    return StreamingResponse(
        _in_turn(chain((first,), chunks)), headers=headers, media_type="application/octet-stream"
    )


async def _in_turn(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Yield chunks; a download that goes on waits for no more than one chunk of each other."""
    limiter = _limiter()
    while (chunk := await to_thread.run_sync(next, chunks, None, limiter=limiter)) is not None:
        if chunk:
            yield chunk


@cache
def _limiter() -> CapacityLimiter:
    return CapacityLimiter(AT_ONCE)


def _endings(store: BatchStore, segments: Sequence[Segment], position: int) -> Iterator[ResultLine]:
    """Yield the lines of what has ended from a position on, in the order in which it ended.

    Each position has one; those of followers (`once`) have as many as there are, and one that runs
    again (`producer retry`) has none until it has ended anew, at a later position.
    """
    for segment in segments:
        done = max(0, position - segment.first)
        for at in range(done, segment.count, ENDINGS):
            count = min(ENDINGS, segment.count - at)
            texts = store.finished_ids(segment.part.id, segment.start + at, count)
            yield from _of_texts(store, segment.part, texts)


def _of_texts(store: BatchStore, part: QueueBatch, texts: list[str]) -> Iterator[ResultLine]:
    endings = [read_ending(text) for text in texts]
    ids = list(dict.fromkeys(request_id for request_id, _ in endings))
    found = dict(zip(ids, store.results(ids), strict=True))
    entries = store.followers(part.id, endings)
    for request_id, numbers in endings:
        raw = found[request_id]
        if not numbers:
            line = stored_line(request_id, raw) if raw is not None else None
            if line is not None:
                yield line
            continue
        for _ in numbers:
            entry = next(entries)
            if entry is not None and raw is not None:
                yield result_line(
                    entry_request_id(part.id, entry), entry[1], entry[0], raw, request_id
                )
