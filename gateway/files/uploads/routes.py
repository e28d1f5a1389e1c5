"""Routes of uploads."""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import AbstractContextManager

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.files.incoming import check_length, receive
from gateway.files.protocol import shown as shown_file
from gateway.files.uploads import completing, uploads
from gateway.files.uploads.protocol import UploadComplete, UploadCreate, UploadPart, shown
from gateway.files.uploads.record import check_open, get
from gateway.http.caller import Caller
from gateway.http.http import caller, new_id, read, reply, services
from gateway.http.idempotency import fingerprint
from gateway.http.services import Services
from gateway.store import Writer


def _id_of(prefix: str, idempotency: str) -> str:
    """Return a new id, or that of the earlier try of the same request."""
    if not idempotency:
        return new_id(prefix)
    return prefix + hashlib.sha256(f"{prefix}{idempotency}".encode()).hexdigest()[:24]


async def _create(request: Request) -> Response:
    asked = read(await request.body(), UploadCreate)
    upload_id = _id_of("upload_", request.scope.get("warmq.idempotency", ""))
    used = services(request)
    record = await run_in_threadpool(uploads.create, used, caller(request), asked, upload_id)
    return reply(shown(record))


async def _part(request: Request) -> Response:
    used, mine = services(request), caller(request)
    upload_id = request.path_params["upload_id"]
    part_id = _id_of("part_", request.scope.get("warmq.idempotency", ""))
    # Before 64 MB are read for nothing.
    length = request.headers.get("content-length", "")
    check_length(length, uploads.MOST_PART_BYTES, "a part", "data")
    now = await asyncio.to_thread(used.clock.now)
    check_open(await run_in_threadpool(get, used, mine.tenant, upload_id), now)
    context: AbstractContextManager[Writer] = used.store.write(part_id)
    writer = await asyncio.to_thread(context.__enter__)
    try:
        incoming = await receive(request, writer, "data", uploads.MOST_PART_BYTES)
        earlier = await fingerprint(request, incoming.digest)
        if earlier is not None:
            return earlier
        await asyncio.to_thread(_keep, used, mine, upload_id, part_id, writer, incoming.size)
    finally:
        await asyncio.to_thread(context.__exit__, None, None, None)
    return reply(UploadPart(id=part_id, created_at=int(now), upload_id=upload_id))


def _keep(
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
    return reply(shown(record, shown_file(file) if file is not None else None))


def _cancel(request: Request) -> Response:
    upload_id = request.path_params["upload_id"]
    return reply(shown(uploads.cancel(services(request), caller(request).tenant, upload_id)))


def routes() -> list[Route]:
    """Return the routes."""
    upload = "/v1/uploads/{upload_id}"
    return [
        Route("/v1/uploads", _create, methods=["POST"]),
        Route(f"{upload}/parts", _part, methods=["POST"]),
        Route(f"{upload}/complete", _complete, methods=["POST"]),
        Route(f"{upload}/cancel", _cancel, methods=["POST"]),
    ]
