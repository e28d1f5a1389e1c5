"""Routes of Anthropic's Message Batches."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from gateway.batches.anthropic import batches
from gateway.batches.anthropic.incoming import Requests, check_length
from gateway.batches.anthropic.protocol import Deleted
from gateway.batches.anthropic.results import results
from gateway.files.objects import FileRecord
from gateway.files.protocol import MOST_LIFE_S
from gateway.http.http import caller, page_limit, reply, services
from gateway.http.idempotency import fingerprint
from gateway.store import Writer

_DEFAULT_LIMIT, _MOST = 20, 1000


def _answer(request: Request, value: Any) -> Response:
    return reply(value, headers={"request-id": request.scope["warmq.request_id"]})


def _base_url(request: Request) -> str:
    """Return where the caller reaches this gateway; only the caller is told."""
    secure = request.headers.get("x-forwarded-proto", request.url.scheme) == "https"
    return f"{'https' if secure else 'http'}://{request.url.netloc}"


async def _create(request: Request) -> Response:
    used, mine = services(request), caller(request)
    keyed = request.scope.get("warmq.idempotency", "")
    batch_id, file_id = batches.ids(mine, keyed)
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
        earlier = await fingerprint(request, incoming.digest)
        if earlier is not None:
            return earlier
        now = int(await asyncio.to_thread(used.clock.now))
        file = FileRecord(
            id=file_id, tenant=mine.tenant, bytes=incoming.written, created_at=now,
            filename=f"{batch_id}.jsonl", purpose="batch", expires_at=now + MOST_LIFE_S,
            digest=incoming.digest if keyed else "",
        )  # fmt: skip
        record = await asyncio.to_thread(
            batches.create, used, mine, batch_id, writer, file, incoming.count
        )
    finally:
        await asyncio.to_thread(context.__exit__, None, None, None)
    base_url = _base_url(request)
    return _answer(request, await run_in_threadpool(batches.view, used, record, base_url))


def _retrieve(request: Request) -> Response:
    used = services(request)
    record = batches.find(used, caller(request), request.path_params["batch_id"])
    return _answer(request, batches.view(used, record, _base_url(request)))


def _list(request: Request) -> Response:
    query = request.query_params
    found = batches.page(
        services(request), caller(request), _base_url(request),
        after=query.get("after_id", ""), before=query.get("before_id", ""),
        limit=page_limit(query.get("limit"), _DEFAULT_LIMIT, _MOST),
    )  # fmt: skip
    return _answer(request, found)


def _cancel(request: Request) -> Response:
    used = services(request)
    record = batches.cancel(used, caller(request), request.path_params["batch_id"])
    return _answer(request, batches.view(used, record, _base_url(request)))


def _delete(request: Request) -> Response:
    batch_id = request.path_params["batch_id"]
    batches.delete(services(request), caller(request), batch_id)
    return _answer(request, Deleted(id=batch_id))


def _results(request: Request) -> Response:
    used = services(request)
    record = batches.ended(used, caller(request), request.path_params["batch_id"])
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
