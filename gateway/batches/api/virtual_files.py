"""Serves files that are made on request from the results in Redis.

`file-out-<batch>` and `file-err-<batch>` belong to a batch of `producer submit` and have the order
of its input. `file-partial-<batch>` has the results so far of any batch, in the order in which its
requests ended. Ids of stored files are hexadecimal, so they have none of these prefixes.
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

#: The regular expression of these files' ids.
ID = rf"(?:{OUTPUT}|{ERRORS}|{PARTIAL})[A-Za-z0-9][A-Za-z0-9._-]{{0,127}}"
_NAMES = {OUTPUT: "output", ERRORS: "error", PARTIAL: "partial"}
#: Most downloads that read lines at the same time. With one thread for each, many downloads would
#: take this process's CPU and threads from online requests.
AT_ONCE = 1
#: Endings of requests that are read in one call.
ENDINGS = 100


def _find(services: Services, caller: Caller, file_id: str) -> tuple[str, BatchView, Batch]:
    """Return a file's prefix and batch; raise ApiError (404) if the caller lacks it."""
    prefix = next(prefix for prefix in _NAMES if file_id.startswith(prefix))
    try:
        batch, view = find(services, caller, file_id.removeprefix(prefix))
    except ApiError:
        raise not_found("file", file_id) from None
    if prefix != PARTIAL and file_id not in (batch.output_file_id, batch.error_file_id):
        raise not_found("file", file_id)
    return prefix, view, batch


def file_object(services: Services, caller: Caller, file_id: str) -> File:
    """Return a file's object as OpenAI's API shows it; `bytes` is always 0."""
    prefix, _, batch = _find(services, caller, file_id)
    name = f"{batch.id}_{_NAMES[prefix]}.jsonl"
    return File(
        id=file_id, bytes=0, created_at=batch.created_at, filename=name, purpose=OUTPUT_PURPOSE
    )


def content(services: Services, caller: Caller, file_id: str, offset: int) -> Response:
    """Return a response that streams a file's lines as they are read.

    Raises:
        ApiError: Before anything is sent. A later error breaks the connection, so that no client
            takes a part of a file for the whole.
    """
    prefix, view, batch = _find(services, caller, file_id)
    headers = {
        "content-disposition": f'attachment; filename="{batch.id}_{_NAMES[prefix]}.jsonl"',
        "x-content-type-options": "nosniff",
    }
    if prefix == PARTIAL:
        return _partial_response(services, view, batch, offset, headers)
    if not isinstance(view.source, QueueBatch):
        raise not_found("file", file_id)
    collector = Collector(services.batches, view.source, follow=False)

    def lines() -> Iterator[bytes | None]:
        for line in collector.lines("input"):
            yield openai_line(line) if line.failed == (prefix == ERRORS) else None
        if prefix == OUTPUT or not batch.output_file_id:
            collector.mark_collected()

    return _stream(lines(), headers)


def _partial_response(
    services: Services, view: BatchView, batch: Batch, offset: int, headers: dict[str, str]
) -> Response:
    """Return a response with the results so far, or after the end all that Redis still has."""
    states = [services.batches.batch(batch_id) for batch_id in part_ids(view)]
    parts = [part for part in states if part is not None and part.status != "deleting"]
    if len(parts) < len(states):
        if batch.status in ENDED:
            return _final_file(batch, offset)
        # The order in which requests ended is known only with all queue batches.
        parts = []
    headers["x-incomplete"] = str(batch.status not in ENDED).lower()
    last = 0
    segments: list[Segment] = []
    if parts:
        order = PartialOrder.using(services.batches)
        ttl_ms = services.settings.result_ttl_ms
        last, segments = order.segments(batch.id, parts, offset, ttl_ms)
    headers["x-last-line"] = str(max(last, offset))
    return _stream(map(openai_line, _result_lines(services.batches, segments, offset)), headers)


def _final_file(batch: Batch, offset: int) -> Response:
    """Return the response for a batch whose queue batches were removed."""
    final = batch.output_file_id or batch.error_file_id
    if final and offset == 0:
        return RedirectResponse(f"/v1/files/{final}/content", 307)
    message = f"batch {batch.id} has ended: read its output_file_id and error_file_id"
    raise ApiError(404, message, code="batch_ended", param="offset")


def _stream(lines: Iterator[bytes | None], headers: dict[str, str]) -> Response:
    chunks = in_chunks(lines)
    try:
        first = next(chunks, b"")
    except BatchChanged as error:
        raise ApiError(404, error.message, code="file_not_found", param="id") from None
    return StreamingResponse(
        _in_turn(chain((first,), chunks)), headers=headers, media_type="application/octet-stream"
    )


async def _in_turn(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Yield chunks that a thread reads; after each chunk another download may read."""
    limiter = _limiter()
    while (chunk := await to_thread.run_sync(next, chunks, None, limiter=limiter)) is not None:
        if chunk:
            yield chunk


@cache
def _limiter() -> CapacityLimiter:
    return CapacityLimiter(AT_ONCE)


def _result_lines(
    store: BatchStore, segments: Sequence[Segment], position: int
) -> Iterator[ResultLine]:
    """Yield result lines from `position` on, in the order in which their requests ended.

    Each ending has one position and usually one line. The ending of a deduplicated request has one
    line for each line of the file with its body. A request that runs again (`producer retry`) has
    no line until it ends again, at a later position.
    """
    for segment in segments:
        skipped = max(0, position - segment.first)
        for at in range(skipped, segment.count, ENDINGS):
            count = min(ENDINGS, segment.count - at)
            texts = store.finished_ids(segment.part.id, segment.start + at, count)
            yield from _lines_of_endings(store, segment.part, texts)


def _lines_of_endings(
    store: BatchStore, part: QueueBatch, texts: list[str]
) -> Iterator[ResultLine]:
    endings = [read_ending(text) for text in texts]
    ids = list(dict.fromkeys(request_id for request_id, _ in endings))
    results = dict(zip(ids, store.results(ids), strict=True))
    entries = store.followers(part.id, endings)
    for request_id, numbers in endings:
        raw = results[request_id]
        if not numbers:
            line = stored_line(request_id, raw) if raw is not None else None
            if line is not None:
                yield line
            continue
        for _ in numbers:
            entry = next(entries)
            if entry is not None and raw is not None:
                own_id = entry_request_id(part.id, entry)
                yield result_line(own_id, entry[1], entry[0], raw, request_id)
