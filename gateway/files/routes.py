"""The routes of files and uploads."""

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

from gateway.file_store import FileStore
from gateway.files import uploads
from gateway.files.files import FileRecord, Files, new_record, save_file
from gateway.files.multipart import FORM_BYTES, check_length, receive
from gateway.files.protocol import (
    MOST_FILES,
    OUTPUT_PURPOSE,
    PURPOSES,
    Deleted,
    FileList,
    file_object,
    life_of,
    purpose_of,
)
from gateway.http.errors import ApiError, invalid, json_error, not_found
from gateway.http.idempotency import replayed_response
from gateway.http.json_api import caller, id_of, new_id, page_limit, read, reply, services

_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


async def _create(request: Request) -> Response:
    gateway, owner = services(request), caller(request)
    idempotent = request.scope.get("warmq.idempotency", "")
    file_id = _id_of("file-", idempotent)
    length = request.headers.get("content-length", "")
    most = gateway.settings.gateway_max_file_bytes
    check_length(length, most, "a file", "file")
    await asyncio.to_thread(gateway.limits.check_records, owner)
    if length.isdecimal():
        least = max(0, int(length) - FORM_BYTES)
        await asyncio.to_thread(gateway.limits.check_bytes, owner, least, int(length))
    async with gateway.store.writing(file_id) as writer:
        form = await receive(request, writer, "file", most)
        purpose, life_s = purpose_of(form.fields), life_of(form.fields)
        content_and_fields = f"{form.digest}\0{purpose}\0{life_s}\0{form.filename}"
        digest = hashlib.sha256(content_and_fields.encode()).hexdigest()
        if (earlier := await replayed_response(request, digest)) is not None:
            return earlier
        now = int(await asyncio.to_thread(gateway.clock.now))
        kept_digest = digest if idempotent else ""
        record = new_record(file_id, owner, form, purpose, life_s, now, kept_digest)
        saved = await asyncio.to_thread(save_file, gateway, owner, writer, record)
    return reply(file_object(saved))


def _id_of(prefix: str, idempotency: str) -> str:
    """Return a new id; with an Idempotency-Key the id that each try of the request gets."""
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
    page = Files(services(request)).page(
        caller(request).tenant, after, limit, oldest_first=order == "asc", purpose=purpose
    )
    if page is None:
        raise not_found("file", after)
    records, has_more = page
    data = [file_object(record) for record in records]
    first, last = (data[0].id, data[-1].id) if data else ("", "")  # OpenAI's ids are never null
    return reply(FileList(data=data, first_id=first, last_id=last, has_more=has_more))


def _find_file(request: Request) -> FileRecord:
    file_id = request.path_params["file_id"]
    record = Files(services(request)).get(caller(request).tenant, file_id)
    if record is None:
        raise not_found("file", file_id)
    return record


def _retrieve(request: Request) -> Response:
    return reply(file_object(_find_file(request)))


def _content(request: Request) -> Response:
    record = _find_file(request)
    store = services(request).store
    if store.size(record.id) is None:
        message = f"the content of file {record.id} is not in this gateway's store"
        raise ApiError(404, message, code="file_not_found")
    return content(store, record, request.headers, head=request.method == "HEAD")


def _delete(request: Request) -> Response:
    file_id = request.path_params["file_id"]
    if not Files(services(request)).delete(caller(request).tenant, file_id):
        raise not_found("file", file_id)
    return reply(Deleted(id=file_id))


def content(
    store: FileStore, record: FileRecord, headers: Mapping[str, str], *, head: bool = False
) -> Response:
    """Return the response to a GET or HEAD of a file's content.

    A request for one range gets the range (RFC 9110, section 14); a malformed range or several
    ranges get the whole file. The ETag is the file's id: the content of an id never changes.
    """
    etag, size = f'"{record.id}"', record.bytes
    out = {
        "etag": etag,
        "accept-ranges": "bytes",
        "content-disposition": f"attachment; filename*=UTF-8''{quote(record.filename, safe='')}",
        "x-content-type-options": "nosniff",
        "cache-control": "private, no-cache",
    }
    if etag in headers.get("if-none-match", ""):
        return Response(status_code=304, headers=out)
    asked = headers.get("range", "") if headers.get("if-range", etag) == etag else ""
    span, status = (0, size), 200
    if range_match := _RANGE.fullmatch(asked):
        range_span = _span_of(range_match[1], range_match[2], size)
        if range_span is None:
            message = f"the range begins after the file's {size} bytes; give an earlier first byte"
            error = ApiError(416, message, code="range_not_satisfiable", param="range")
            return json_error(error, {"content-range": f"bytes */{size}", "accept-ranges": "bytes"})
        span, status = range_span, 206
        out["content-range"] = f"bytes {span[0]}-{span[1] - 1}/{size}"
    out["content-length"] = str(span[1] - span[0])
    pieces = () if head else store.read(record.id, *span)
    return StreamingResponse(pieces, status, out, "application/octet-stream")


def _span_of(first: str, last: str, size: int) -> tuple[int, int] | None:
    """Return a range's start and end (exclusive); None if it begins after the file."""
    if not first and not last:
        return 0, size
    if not first:  # the last n bytes
        count = min(int(last), size)
        return (size - count, size) if count else None
    start = int(first)
    end = min(int(last) + 1, size) if last else size
    return (start, end) if start < end else None


async def _create_upload(request: Request) -> Response:
    asked = read(await request.body(), uploads.UploadCreate)
    upload_id = _id_of("upload_", request.scope.get("warmq.idempotency", ""))
    record = await run_in_threadpool(
        uploads.create, services(request), caller(request), asked, upload_id
    )
    return reply(uploads.upload_object(record))


async def _add_part(request: Request) -> Response:
    gateway, owner = services(request), caller(request)
    upload_id = request.path_params["upload_id"]
    part_id = _id_of("part_", request.scope.get("warmq.idempotency", ""))
    # A part that cannot be added is refused before its 64 MB are read.
    length = request.headers.get("content-length", "")
    check_length(length, uploads.MOST_PART_BYTES, "a part", "data")
    now = await asyncio.to_thread(gateway.clock.now)
    upload = await run_in_threadpool(uploads.get, gateway, owner.tenant, upload_id)
    uploads.check_open(upload, now)
    async with gateway.store.writing(part_id) as writer:
        form = await receive(request, writer, "data", uploads.MOST_PART_BYTES)
        if (earlier := await replayed_response(request, form.digest)) is not None:
            return earlier

        def keep() -> None:
            uploads.add_part(gateway, owner, upload_id, part_id, form.size)
            writer.commit()

        await asyncio.to_thread(keep)
    return reply(uploads.UploadPart(id=part_id, created_at=int(now), upload_id=upload_id))


async def _complete(request: Request) -> Response:
    asked = read(await request.body(), uploads.UploadComplete)
    upload_id = request.path_params["upload_id"]
    record, file = await run_in_threadpool(
        uploads.complete, services(request), caller(request), upload_id, asked
    )
    return reply(uploads.upload_object(record, file_object(file) if file is not None else None))


def _cancel(request: Request) -> Response:
    upload_id = request.path_params["upload_id"]
    record = uploads.cancel(services(request), caller(request).tenant, upload_id)
    return reply(uploads.upload_object(record))


def routes() -> list[Route]:
    upload = "/v1/uploads/{upload_id}"
    return [
        Route("/v1/files", _create, methods=["POST"]),
        Route("/v1/files", _list, methods=["GET"]),
        Route("/v1/files/{file_id}", _retrieve, methods=["GET"]),
        Route("/v1/files/{file_id}", _delete, methods=["DELETE"]),
        Route("/v1/files/{file_id}/content", _content, methods=["GET"]),
        Route("/v1/uploads", _create_upload, methods=["POST"]),
        Route(f"{upload}/parts", _add_part, methods=["POST"]),
        Route(f"{upload}/complete", _complete, methods=["POST"]),
        Route(f"{upload}/cancel", _cancel, methods=["POST"]),
    ]
