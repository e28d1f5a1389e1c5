"""What can be done to message batches: make, find, list, cancel, delete; and the routes.

A batch is a BatchRecord like any. Beside it stands an object of the kind `message_batch`: their
own list, which pages both ways, and once a batch has ended how its failures have.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from typing import Any

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from contract.redis.objects import Kind, Stored
from gateway.batches.anthropic.create_body import Requests, check_length
from gateway.batches.anthropic.protocol import (
    ENDPOINT,
    KEPT_S,
    PREFIX,
    WINDOW_S,
    Deleted,
    MessageBatch,
    MessageBatchList,
    Split,
    count,
    results,
    shown,
    split_in,
)
from gateway.batches.api.batches import DEFAULT_PRIORITY
from gateway.batches.api.record import (
    ENDED,
    BatchRecord,
    RequestCounts,
    decode,
    end_of_record,
    request_cancel,
    reserve,
    start_batch,
)
from gateway.file_store import FileStoreFailed, Writer
from gateway.files.files import FileRecord, Files, check_same_file, save_file
from gateway.files.protocol import MOST_LIFE_S
from gateway.http.caller import Caller
from gateway.http.errors import ApiError, invalid, not_found
from gateway.http.idempotency import conflict, replayed_response
from gateway.http.json_api import caller, id_of, new_id, page_limit, reply, services
from gateway.http.services import Services

_KIND: Kind = "message_batch"
#: Batches in a page: by default, and at most.
_DEFAULT_LIMIT, _MOST = 20, 1000
_encode = msgspec.json.Encoder().encode


def ids(caller: Caller, idempotency: str) -> tuple[str, str]:
    """Return the ids of a new batch and its input file: the same for each try of a create."""
    if not idempotency:
        return new_id(PREFIX), new_id("file-")
    name = f"{PREFIX}\0{caller.tenant}\0{idempotency}"
    return id_of(PREFIX, name), id_of("file-", name)


def create(
    services: Services, caller: Caller, batch_id: str, writer: Writer, file: FileRecord, total: int
) -> BatchRecord:
    """Keep the input file that was written, and ask for the batch to be carried; or find the batch
    that the same create has made before.

    Raises:
        ApiError: 409, another create had its Idempotency-Key; 429 over a quota.
    """
    stored = services.objects.get("batch", caller.tenant, batch_id)
    if stored is not None:
        known = Files(services).get(caller.tenant, file.id)
        if known is None:  # its file was deleted: nothing tells what it was
            raise conflict()
        check_same_file(known, file)
        return decode(stored.document)
    reserve(services, caller, batch_id, file.bytes)
    try:
        save_file(services, caller, writer, file)
    except (ApiError, FileStoreFailed):
        services.limits.give_back(batch_id)
        raise
    now = int(services.clock.now())
    record = BatchRecord(
        id=batch_id, tenant=caller.tenant, key_id=caller.key_id, api="anthropic",
        endpoint=ENDPOINT, input_file_id=file.id, completion_window="24h", created_at=now,
        expires_at=now + WINDOW_S, changed_at={"validating": now}, output_expires_after_s=KEPT_S,
        priority=max(DEFAULT_PRIORITY, caller.highest_priority), counts=RequestCounts(total=total),
    )  # fmt: skip
    # Into the list first: it must be there as soon as it can be carried.
    services.objects.create(_KIND, caller.tenant, batch_id, now, b"null")
    start_batch(services, record)
    return find(services, caller, batch_id)


def find(services: Services, caller: Caller, batch_id: str) -> BatchRecord:
    """Return one of the caller's message batches; raises ApiError (404) if there is none."""
    stored = services.objects.get("batch", caller.tenant, batch_id)
    record = decode(stored.document) if stored is not None else None
    if record is None or record.api != "anthropic":
        raise not_found("message batch", batch_id)
    return record


def view(services: Services, record: BatchRecord, base_url: str) -> MessageBatch:
    """Return a batch as it is shown."""
    split = Split()
    if record.status in ENDED:
        stored = services.objects.get(_KIND, record.tenant, record.id)
        known = split_in(stored) if stored is not None else None
        split = known or count(services, record)
        if known is None and stored is not None:
            _remember(services, record, stored, split)
    return shown(record, split, base_url)


def _remember(services: Services, record: BatchRecord, stored: Stored, split: Split) -> None:
    """Keep what was counted: the error file may be long, and is removed one day."""
    services.objects.replace(
        _KIND, record.tenant, stored, _encode(split), record.created_at, end_of_record(record)
    )


def page(
    services: Services, caller: Caller, base_url: str, *, after: str, before: str, limit: int
) -> MessageBatchList:
    """Return batches, newest first: those after one of them, or those just before one."""
    if after and before:
        raise invalid("give after_id or before_id, not both", "after_id")
    found = services.objects.page(
        _KIND, caller.tenant, after=after or before, limit=limit, oldest_first=bool(before)
    )
    if found is None:
        raise not_found("message batch", after or before)
    entries = found.objects[::-1] if before else found.objects
    data = []
    for entry in entries:
        stored = services.objects.get("batch", caller.tenant, entry.id)
        if stored is not None:  # else its create ended between the two
            data.append(view(services, decode(stored.document), base_url))
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return MessageBatchList(data=data, has_more=found.has_more, first_id=first, last_id=last)


def cancel(services: Services, caller: Caller, batch_id: str) -> BatchRecord:
    """Begin to cancel a batch; the same again for one that is being cancelled or was."""
    record = find(services, caller, batch_id)
    if record.status in ENDED and record.status != "cancelled":
        raise invalid(f"batch {batch_id} has ended; only one that is in progress can be canceled")
    return request_cancel(services, caller.tenant, batch_id) or record


def delete(services: Services, caller: Caller, batch_id: str) -> None:
    """Remove a batch that has ended, with its files."""
    record = find(services, caller, batch_id)
    if record.status not in ENDED:
        raise invalid(f"batch {batch_id} is in progress: cancel it, then delete it")
    files = Files(services)
    for file_id in (record.input_file_id, record.output_file_id, record.error_file_id):
        if file_id is not None:
            files.delete(caller.tenant, file_id)
    # The batch last: who asks again, because a gateway died at it, must find it.
    services.objects.delete("batch", caller.tenant, batch_id)


def ended(services: Services, caller: Caller, batch_id: str) -> BatchRecord:
    """Return a batch whose results can be read; raises ApiError if it has not ended."""
    record = find(services, caller, batch_id)
    if record.status not in ENDED:
        raise invalid(f"batch {batch_id} is in progress; it has results once it has ended")
    files = [f for f in (record.output_file_id, record.error_file_id) if f is not None]
    if files and not any(Files(services).get(caller.tenant, f) for f in files):
        raise ApiError(404, f"the results of batch {batch_id} have expired", code="results_expired")
    return record


def _answer(request: Request, value: Any) -> Response:
    return reply(value, headers={"request-id": request.scope["warmq.request_id"]})


def _base_url(request: Request) -> str:
    """Return where the caller reaches this gateway; only the caller is told."""
    secure = request.headers.get("x-forwarded-proto", request.url.scheme) == "https"
    return f"{'https' if secure else 'http'}://{request.url.netloc}"


async def _create(request: Request) -> Response:
    used, mine = services(request), caller(request)
    keyed = request.scope.get("warmq.idempotency", "")
    batch_id, file_id = ids(mine, keyed)
    length = request.headers.get("content-length", "")
    await asyncio.to_thread(used.limits.check_records, mine)
    if length.isdecimal():
        check_length(int(length))
        await asyncio.to_thread(used.limits.check_bytes, mine, int(length), int(length))
    context: AbstractContextManager[Writer] = used.store.write(file_id)
    writer = await asyncio.to_thread(context.__enter__)
    try:
        incoming = Requests(writer, used.settings.max_line_bytes)
        async for piece in request.stream():
            if piece:
                await asyncio.to_thread(incoming.feed, piece)
        await asyncio.to_thread(incoming.end)
        earlier = await replayed_response(request, incoming.digest)
        if earlier is not None:
            return earlier
        now = int(await asyncio.to_thread(used.clock.now))
        file = FileRecord(
            id=file_id, tenant=mine.tenant, bytes=incoming.written, created_at=now,
            filename=f"{batch_id}.jsonl", purpose="batch", expires_at=now + MOST_LIFE_S,
            digest=incoming.digest if keyed else "",
        )  # fmt: skip
        record = await asyncio.to_thread(create, used, mine, batch_id, writer, file, incoming.count)
    finally:
        await asyncio.to_thread(context.__exit__, None, None, None)
    base_url = _base_url(request)
    return _answer(request, await run_in_threadpool(view, used, record, base_url))


def _retrieve(request: Request) -> Response:
    used = services(request)
    record = find(used, caller(request), request.path_params["batch_id"])
    return _answer(request, view(used, record, _base_url(request)))


def _list(request: Request) -> Response:
    query = request.query_params
    found = page(
        services(request), caller(request), _base_url(request),
        after=query.get("after_id", ""), before=query.get("before_id", ""),
        limit=page_limit(query.get("limit"), _DEFAULT_LIMIT, _MOST),
    )  # fmt: skip
    return _answer(request, found)


def _cancel(request: Request) -> Response:
    used = services(request)
    record = cancel(used, caller(request), request.path_params["batch_id"])
    return _answer(request, view(used, record, _base_url(request)))


def _delete(request: Request) -> Response:
    batch_id = request.path_params["batch_id"]
    delete(services(request), caller(request), batch_id)
    return _answer(request, Deleted(id=batch_id))


def _results(request: Request) -> Response:
    used = services(request)
    record = ended(used, caller(request), request.path_params["batch_id"])
    headers = {
        "request-id": request.scope["warmq.request_id"],
        "content-disposition": f'attachment; filename="{record.id}_results.jsonl"',
        "x-content-type-options": "nosniff",
    }
    return StreamingResponse(results(used, record), 200, headers, "application/x-jsonl")


def routes() -> list[Route]:
    """Return the routes."""
    one = "/v1/messages/batches/{batch_id}"
    return [
        Route("/v1/messages/batches", _create, methods=["POST"]),
        Route("/v1/messages/batches", _list, methods=["GET"]),
        Route(one, _retrieve, methods=["GET"]),
        Route(one, _delete, methods=["DELETE"]),
        Route(f"{one}/cancel", _cancel, methods=["POST"]),
        Route(f"{one}/results", _results, methods=["GET"]),
    ]
