"""Creates, lists, cancels and deletes message batches (Anthropic's API), and has their routes.

Each batch is a BatchRecord. A second record in Redis, with the kind `message_batch` and the same
id, is its entry in the list of message batches and keeps the counts of its failures.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from contract.redis.objects import Kind
from gateway.batches.anthropic.create_body import RequestLines, check_length
from gateway.batches.anthropic.protocol import (
    ENDPOINT,
    KEPT_S,
    PREFIX,
    WINDOW_S,
    Deleted,
    FailureCounts,
    MessageBatch,
    MessageBatchList,
    count_failures,
    failures_in,
    message_batch,
    results,
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
#: Batches on a page of the list: the default, and the most that a caller may ask for.
_DEFAULT_LIMIT, _MOST = 20, 1000
_encode = msgspec.json.Encoder().encode


def _new_ids(caller: Caller, idempotency: str) -> tuple[str, str]:
    """Return the ids of a new batch and its input file.

    All tries with one Idempotency-Key get the same ids.
    """
    if not idempotency:
        return new_id(PREFIX), new_id("file-")
    name = f"{PREFIX}\0{caller.tenant}\0{idempotency}"
    return id_of(PREFIX, name), id_of("file-", name)


def create(
    services: Services, caller: Caller, batch_id: str, writer: Writer, file: FileRecord, total: int
) -> BatchRecord:
    """Save the input file and create the batch, unless an earlier try has done so."""
    stored = services.objects.get("batch", caller.tenant, batch_id)
    if stored is not None:
        earlier_file = Files(services).get(caller.tenant, file.id)
        if earlier_file is None:  # deleted, so the files cannot be compared
            raise conflict()
        check_same_file(earlier_file, file)
        return decode(stored.document)
    reserve(services, caller, batch_id, file.bytes)
    try:
        save_file(services, caller, writer, file)
    except (ApiError, FileStoreFailed):
        services.limits.give_back(batch_id)
        raise
    now = int(services.clock.now())
    # A larger number is served later: max() keeps to the caller's highest priority.
    record = BatchRecord(
        id=batch_id, tenant=caller.tenant, key_id=caller.key_id, api="anthropic",
        endpoint=ENDPOINT, input_file_id=file.id, completion_window="24h", created_at=now,
        expires_at=now + WINDOW_S, changed_at={"validating": now}, output_expires_after_s=KEPT_S,
        priority=max(DEFAULT_PRIORITY, caller.highest_priority), counts=RequestCounts(total=total),
    )  # fmt: skip
    # The entry in the list comes first: a batch that runs must be listed. It has no counts (null)
    # before the batch's end.
    services.objects.create(_KIND, caller.tenant, batch_id, now, b"null")
    start_batch(services, record)
    return find(services, caller, batch_id)


def find(services: Services, caller: Caller, batch_id: str) -> BatchRecord:
    """Return one of the caller's message batches; raise ApiError (404) if there is none."""
    stored = services.objects.get("batch", caller.tenant, batch_id)
    record = decode(stored.document) if stored is not None else None
    if record is None or record.api != "anthropic":
        raise not_found("message batch", batch_id)
    return record


def _view(services: Services, record: BatchRecord, base_url: str) -> MessageBatch:
    """Return a batch as Anthropic's API shows it.

    After its end the batch has the counts of its failures. They are stored, because the error file
    may be long and expires.
    """
    failures = FailureCounts()
    if record.status in ENDED:
        stored = services.objects.get(_KIND, record.tenant, record.id)
        stored_counts = failures_in(stored) if stored is not None else None
        failures = stored_counts or count_failures(services, record)
        if stored_counts is None and stored is not None:
            new, end = _encode(failures), end_of_record(record)
            services.objects.replace(_KIND, record.tenant, stored, new, record.created_at, end)
    return message_batch(record, failures, base_url)


def _page(
    services: Services, caller: Caller, base_url: str, *, after: str, before: str, limit: int
) -> MessageBatchList:
    if after and before:
        raise invalid("give after_id or before_id, not both", "after_id")
    page = services.objects.page(
        _KIND, caller.tenant, after=after or before, limit=limit, oldest_first=bool(before)
    )
    if page is None:
        raise not_found("message batch", after or before)
    entries = page.objects[::-1] if before else page.objects
    data = []
    for entry in entries:
        stored = services.objects.get("batch", caller.tenant, entry.id)
        if stored is not None:  # None if a gateway died between the two writes
            data.append(_view(services, decode(stored.document), base_url))
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return MessageBatchList(data=data, has_more=page.has_more, first_id=first, last_id=last)


def _find_ended(services: Services, caller: Caller, batch_id: str, problem: str) -> BatchRecord:
    """Return a batch that has ended; raise ApiError (400) with `problem` for a running one."""
    record = find(services, caller, batch_id)
    if record.status not in ENDED:
        raise invalid(f"batch {batch_id} is in progress{problem}")
    return record


def delete(services: Services, caller: Caller, batch_id: str) -> None:
    """Delete a batch that has ended, with its files."""
    record = _find_ended(services, caller, batch_id, ": cancel it, then delete it")
    files = Files(services)
    for file_id in (record.input_file_id, record.output_file_id, record.error_file_id):
        if file_id is not None:
            files.delete(caller.tenant, file_id)
    # The batch is deleted last: if this gateway dies, a repeated DELETE must find it.
    services.objects.delete("batch", caller.tenant, batch_id)


def _answer(request: Request, value: Any) -> Response:
    return reply(value, headers={"request-id": request.scope["warmq.request_id"]})


def _base_url(request: Request) -> str:
    """Return this gateway's base URL as the caller reaches it.

    Only the caller gets it, so that a forged Host harms nobody else.
    """
    secure = request.headers.get("x-forwarded-proto", request.url.scheme) == "https"
    return f"{'https' if secure else 'http'}://{request.url.netloc}"


async def _create(request: Request) -> Response:
    gateway, owner = services(request), caller(request)
    idempotent = request.scope.get("warmq.idempotency", "")
    batch_id, file_id = _new_ids(owner, idempotent)
    length = request.headers.get("content-length", "")
    await asyncio.to_thread(gateway.limits.check_records, owner)
    if length.isdecimal():
        size = int(length)
        check_length(size)
        await asyncio.to_thread(gateway.limits.check_bytes, owner, size=size, body=size)
    async with gateway.store.writing(file_id) as writer:
        lines = RequestLines(writer, gateway.settings.max_line_bytes)
        async for piece in request.stream():
            if piece:
                await asyncio.to_thread(lines.feed, piece)
        await asyncio.to_thread(lines.end)
        if (earlier := await replayed_response(request, lines.digest)) is not None:
            return earlier
        now = int(await asyncio.to_thread(gateway.clock.now))
        file = FileRecord(
            id=file_id, tenant=owner.tenant, bytes=lines.written, created_at=now,
            filename=f"{batch_id}.jsonl", purpose="batch", expires_at=now + MOST_LIFE_S,
            digest=lines.digest if idempotent else "",
        )  # fmt: skip
        record = await asyncio.to_thread(
            create, gateway, owner, batch_id, writer, file, lines.count
        )
    base_url = _base_url(request)
    return _answer(request, await run_in_threadpool(_view, gateway, record, base_url))


def _retrieve(request: Request) -> Response:
    gateway = services(request)
    record = find(gateway, caller(request), request.path_params["batch_id"])
    return _answer(request, _view(gateway, record, _base_url(request)))


def _list(request: Request) -> Response:
    query = request.query_params
    page = _page(
        services(request), caller(request), _base_url(request),
        after=query.get("after_id", ""), before=query.get("before_id", ""),
        limit=page_limit(query.get("limit"), _DEFAULT_LIMIT, _MOST),
    )  # fmt: skip
    return _answer(request, page)


def _cancel(request: Request) -> Response:
    gateway, owner = services(request), caller(request)
    batch_id = request.path_params["batch_id"]
    record = find(gateway, owner, batch_id)
    if record.status in ENDED and record.status != "cancelled":
        raise invalid(f"batch {batch_id} has ended; only one that is in progress can be canceled")
    record = request_cancel(gateway, owner.tenant, batch_id) or record
    return _answer(request, _view(gateway, record, _base_url(request)))


def _delete(request: Request) -> Response:
    batch_id = request.path_params["batch_id"]
    delete(services(request), caller(request), batch_id)
    return _answer(request, Deleted(id=batch_id))


def _results(request: Request) -> Response:
    gateway, owner = services(request), caller(request)
    batch_id = request.path_params["batch_id"]
    record = _find_ended(gateway, owner, batch_id, "; it has results once it has ended")
    files = [f for f in (record.output_file_id, record.error_file_id) if f is not None]
    if files and not any(Files(gateway).get(owner.tenant, f) for f in files):
        raise ApiError(404, f"the results of batch {batch_id} have expired", code="results_expired")
    headers = {
        "request-id": request.scope["warmq.request_id"],
        "content-disposition": f'attachment; filename="{record.id}_results.jsonl"',
        "x-content-type-options": "nosniff",
    }
    return StreamingResponse(results(gateway, record), 200, headers, "application/x-jsonl")


def routes() -> list[Route]:
    one = "/v1/messages/batches/{batch_id}"
    return [
        Route("/v1/messages/batches", _create, methods=["POST"]),
        Route("/v1/messages/batches", _list, methods=["GET"]),
        Route(one, _retrieve, methods=["GET"]),
        Route(one, _delete, methods=["DELETE"]),
        Route(f"{one}/cancel", _cancel, methods=["POST"]),
        Route(f"{one}/results", _results, methods=["GET"]),
    ]
