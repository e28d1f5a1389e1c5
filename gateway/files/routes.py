"""Routes of files."""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import AbstractContextManager

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.files.content import content
from gateway.files.incoming import FORM_BYTES, check_length, receive
from gateway.files.keeping import keep, record_of
from gateway.files.objects import FileRecord, Files
from gateway.files.protocol import (
    MOST_FILES,
    OUTPUT_PURPOSE,
    PURPOSES,
    Deleted,
    FileList,
    life_of,
    purpose_of,
    shown,
)
from gateway.http.errors import ApiError, invalid, not_found
from gateway.http.http import caller, new_id, page_limit, reply, services
from gateway.http.idempotency import fingerprint
from gateway.store import Writer


async def _create(request: Request) -> Response:
    used, mine = services(request), caller(request)
    keyed = request.scope.get("warmq.idempotency", "")
    file_id = _id_of(keyed)
    length = request.headers.get("content-length", "")
    most = used.settings.gateway_max_file_bytes
    check_length(length, most, "a file", "file")
    await asyncio.to_thread(used.limits.check_records, mine)
    if length.isdecimal():
        least = max(0, int(length) - FORM_BYTES)
        await asyncio.to_thread(used.limits.check_bytes, mine, least, int(length))
    context: AbstractContextManager[Writer] = used.store.write(file_id)
    writer = await asyncio.to_thread(context.__enter__)
    try:
        incoming = await receive(request, writer, "file", most)
        purpose, life = purpose_of(incoming.fields), life_of(incoming.fields)
        shaping = f"{incoming.digest}\0{purpose}\0{life}\0{incoming.filename}"
        digest = hashlib.sha256(shaping.encode()).hexdigest()
        earlier = await fingerprint(request, digest)
        if earlier is not None:
            return earlier
        now = int(await asyncio.to_thread(used.clock.now))
        record = record_of(file_id, mine, incoming, purpose, life, now, digest if keyed else "")
        made = await asyncio.to_thread(keep, used, mine, writer, record)
    finally:
        await asyncio.to_thread(context.__exit__, None, None, None)
    return reply(shown(made))


def _id_of(idempotency: str) -> str:
    if not idempotency:
        return new_id("file-")
    return f"file-{hashlib.sha256(f'file{idempotency}'.encode()).hexdigest()[:24]}"


def _list(request: Request) -> Response:
    query = request.query_params
    limit = page_limit(query.get("limit"), MOST_FILES, MOST_FILES)
    order, purpose = query.get("order", "desc"), query.get("purpose")
    if order not in ("asc", "desc"):
        raise invalid(f"order {order[:40]!r}: give asc or desc", "order")
    if purpose is not None and purpose not in (*PURPOSES, OUTPUT_PURPOSE):
        raise invalid(f"purpose {purpose[:60]!r} is unknown", "purpose")
    after = query.get("after", "")
    found = Files(services(request)).page(
        caller(request).tenant, after, limit, oldest_first=order == "asc", purpose=purpose
    )
    if found is None:
        raise not_found("file", after)
    records, has_more = found
    data = [shown(record) for record in records]
    first, last = (data[0].id, data[-1].id) if data else ("", "")  # OpenAI's are never null
    return reply(FileList(data=data, first_id=first, last_id=last, has_more=has_more))


def _found(request: Request) -> FileRecord:
    file_id = request.path_params["file_id"]
    record = Files(services(request)).get(caller(request).tenant, file_id)
    if record is None:
        raise not_found("file", file_id)
    return record


def _retrieve(request: Request) -> Response:
    return reply(shown(_found(request)))


def _content(request: Request) -> Response:
    record = _found(request)
    store = services(request).store
    if store.size(record.id) is None:
        told = f"the content of file {record.id} is not in this gateway's store"
        raise ApiError(404, told, code="file_not_found")
    return content(store, record, request.headers, head=request.method == "HEAD")


def _delete(request: Request) -> Response:
    file_id = request.path_params["file_id"]
    if not Files(services(request)).delete(caller(request).tenant, file_id):
        raise not_found("file", file_id)
    return reply(Deleted(id=file_id))


def routes() -> list[Route]:
    """Return the routes."""
    return [
        Route("/v1/files", _create, methods=["POST"]),
        Route("/v1/files", _list, methods=["GET"]),
        Route("/v1/files/{file_id}", _retrieve, methods=["GET"]),
        Route("/v1/files/{file_id}", _delete, methods=["DELETE"]),
        Route("/v1/files/{file_id}/content", _content, methods=["GET"]),
    ]
