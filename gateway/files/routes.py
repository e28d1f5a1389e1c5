"""Routes of files and uploads."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Mapping
from urllib.parse import quote

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from gateway.file_store import FileStore, Writer
from gateway.files import complete as completing
from gateway.files import uploads
from gateway.files.files import FileRecord, Files, new_record, save_file
from gateway.files.multipart import FORM_BYTES, check_length, receive
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
from gateway.files.uploads import UploadComplete, UploadCreate, UploadPart, check_open
from gateway.http.caller import Caller
from gateway.http.errors import ApiError, invalid, json_error, not_found
from gateway.http.idempotency import replayed_response
from gateway.http.json_api import caller, id_of, new_id, page_limit, read, reply, services
from gateway.http.services import Services

_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


async def _create(request: Request) -> Response:
    used, mine = services(request), caller(request)
    keyed = request.scope.get("warmq.idempotency", "")
    file_id = _id_of("file-", keyed)
    length = request.headers.get("content-length", "")
    most = used.settings.gateway_max_file_bytes
    check_length(length, most, "a file", "file")
    await asyncio.to_thread(used.limits.check_records, mine)
    if length.isdecimal():
        least = max(0, int(length) - FORM_BYTES)
        await asyncio.to_thread(used.limits.check_bytes, mine, least, int(length))
    async with used.store.writing(file_id) as writer:
        incoming = await receive(request, writer, "file", most)
        purpose, life = purpose_of(incoming.fields), life_of(incoming.fields)
        shaping = f"{incoming.digest}\0{purpose}\0{life}\0{incoming.filename}"
        digest = hashlib.sha256(shaping.encode()).hexdigest()
        earlier = await replayed_response(request, digest)
        if earlier is not None:
            return earlier
        now = int(await asyncio.to_thread(used.clock.now))
        record = new_record(file_id, mine, incoming, purpose, life, now, digest if keyed else "")
        made = await asyncio.to_thread(save_file, used, mine, writer, record)
    return reply(shown(made))


def _id_of(prefix: str, idempotency: str) -> str:
    """Return a new id, or that of the earlier try of the same request."""
    if not idempotency:
        return new_id(prefix)
    return id_of(prefix, f"{prefix.removesuffix('-')}{idempotency}")


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


def content(
    store: FileStore, record: FileRecord, headers: Mapping[str, str], *, head: bool = False
) -> Response:
    """Return the answer to a GET of a file's content, or to a HEAD, which reads nothing.

    One range is served (RFC 9110, section 14); several, and what is no range of bytes, get the
    whole. The ETag is the file's id: no content changes under its id.
    """
    etag = f'"{record.id}"'
    told = {
        "etag": etag,
        "accept-ranges": "bytes",
        "content-disposition": f"attachment; filename*=UTF-8''{quote(record.filename, safe='')}",
        "x-content-type-options": "nosniff",
        "cache-control": "private, no-cache",
    }
    if etag in headers.get("if-none-match", ""):
        return Response(status_code=304, headers=told)
    size = record.bytes
    wanted = _wanted(headers, etag, size)
    if wanted is None:
        beyond = f"the range begins beyond the file's {size} bytes; ask for one that begins before"
        error = ApiError(416, beyond, code="range_not_satisfiable", param="range")
        return json_error(error, {"content-range": f"bytes */{size}", "accept-ranges": "bytes"})
    start, end = wanted
    status = 200
    if (start, end) != (0, size) or _RANGE.fullmatch(_asked(headers, etag)):
        status = 206
        told["content-range"] = f"bytes {start}-{end - 1}/{size}"
    told["content-length"] = str(end - start)
    pieces = () if head else store.read(record.id, start, end)
    return StreamingResponse(pieces, status, told, "application/octet-stream")


def _asked(headers: Mapping[str, str], etag: str) -> str:
    """Return the Range header, '' where it does not apply."""
    return headers.get("range", "") if headers.get("if-range", etag) == etag else ""


def _wanted(headers: Mapping[str, str], etag: str, size: int) -> tuple[int, int] | None:
    """Return the bytes that are asked for, the second exclusive; None for a range beyond."""
    found = _RANGE.fullmatch(_asked(headers, etag))
    if found is None or found[1] == found[2] == "":
        return 0, size
    if not found[1]:  # the last n bytes
        last = min(int(found[2]), size)
        return (size - last, size) if last else None
    start = int(found[1])
    end = min(int(found[2]) + 1, size) if found[2] else size
    return (start, end) if start < end else None


async def _create_upload(request: Request) -> Response:
    asked = read(await request.body(), UploadCreate)
    upload_id = _id_of("upload_", request.scope.get("warmq.idempotency", ""))
    used = services(request)
    record = await run_in_threadpool(uploads.create, used, caller(request), asked, upload_id)
    return reply(uploads.shown(record))


async def _part(request: Request) -> Response:
    used, mine = services(request), caller(request)
    upload_id = request.path_params["upload_id"]
    part_id = _id_of("part_", request.scope.get("warmq.idempotency", ""))
    # Before 64 MB are read for nothing.
    length = request.headers.get("content-length", "")
    check_length(length, uploads.MOST_PART_BYTES, "a part", "data")
    now = await asyncio.to_thread(used.clock.now)
    check_open(await run_in_threadpool(uploads.get, used, mine.tenant, upload_id), now)
    async with used.store.writing(part_id) as writer:
        incoming = await receive(request, writer, "data", uploads.MOST_PART_BYTES)
        earlier = await replayed_response(request, incoming.digest)
        if earlier is not None:
            return earlier
        await asyncio.to_thread(_keep_part, used, mine, upload_id, part_id, writer, incoming.size)
    return reply(UploadPart(id=part_id, created_at=int(now), upload_id=upload_id))


def _keep_part(
    used: Services, mine: Caller, upload_id: str, part_id: str, writer: Writer, size: int
) -> None:
    uploads.add_part(used, mine, upload_id, part_id, size)
    writer.commit()


async def _complete(request: Request) -> Response:
    asked = read(await request.body(), UploadComplete)
    upload_id = request.path_params["upload_id"]
    record, file = await run_in_threadpool(
        completing.complete, services(request), caller(request), upload_id, asked
    )
    return reply(uploads.shown(record, shown(file) if file is not None else None))


def _cancel(request: Request) -> Response:
    upload_id = request.path_params["upload_id"]
    record = uploads.cancel(services(request), caller(request).tenant, upload_id)
    return reply(uploads.shown(record))


def routes() -> list[Route]:
    """Return the routes."""
    upload = "/v1/uploads/{upload_id}"
    return [
        Route("/v1/files", _create, methods=["POST"]),
        Route("/v1/files", _list, methods=["GET"]),
        Route("/v1/files/{file_id}", _retrieve, methods=["GET"]),
        Route("/v1/files/{file_id}", _delete, methods=["DELETE"]),
        Route("/v1/files/{file_id}/content", _content, methods=["GET"]),
        Route("/v1/uploads", _create_upload, methods=["POST"]),
        Route(f"{upload}/parts", _part, methods=["POST"]),
        Route(f"{upload}/complete", _complete, methods=["POST"]),
        Route(f"{upload}/cancel", _cancel, methods=["POST"]),
    ]
