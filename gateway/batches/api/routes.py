"""Routes of batches, and of the files that are read from the queue."""

from __future__ import annotations

from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.convertors import Convertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from contract.batch import Batch as QueueBatch
from gateway.batches.api import batches, virtual_files
from gateway.http.errors import ApiError, invalid
from gateway.http.json_api import caller, page_limit, reply, services

#: Batches in a page: by default, and at most.
DEFAULT_LIMIT, MOST = 20, 100


class _VirtualId(Convertor[str]):
    """Takes ids of virtual files alone: all others are those of files/."""

    regex = virtual_files.ID

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("virtual_file", _VirtualId())


async def _create(request: Request) -> Response:
    body = await request.body()
    idempotency = request.scope.get("warmq.idempotency", "")
    made = await run_in_threadpool(
        batches.create, services(request), caller(request), body, idempotency
    )
    return reply(made)


def _list(request: Request) -> Response:
    query = request.query_params
    limit = page_limit(query.get("limit"), DEFAULT_LIMIT, MOST)
    return reply(batches.page(services(request), caller(request), query.get("after", ""), limit))


def _retrieve(request: Request) -> Response:
    wish = request.query_params.get("partial") or request.headers.get("x-partial-results") or ""
    batch_id, partial = request.path_params["batch_id"], wish.lower() in ("true", "1")
    return reply(batches.retrieve(services(request), caller(request), batch_id, partial=partial))


def _cancel(request: Request) -> Response:
    used = services(request)
    batch, view = batches.cancel(used, caller(request), request.path_params["batch_id"])
    response = reply(batch)
    if isinstance(view.source, QueueBatch) and batch.status == "cancelling":
        # Each waiting request is ended: of a million that takes longer than clients wait. Should
        # this process die, workers end what is left as they come to it.
        response.background = BackgroundTask(used.batches.cancel, view.source)
    return response


def _virtual_file(request: Request) -> Response:
    file_id = request.path_params["file_id"]
    return reply(virtual_files.file_object(services(request), caller(request), file_id))


def _virtual_content(request: Request) -> Response:
    offset = request.query_params.get("offset", "0")
    if not (offset.isdecimal() and offset.isascii() and len(offset) < 16):
        told = f"offset is {offset[:40]!r}; give the X-Last-Line of an earlier answer"
        raise invalid(told, "offset")
    used, file_id = services(request), request.path_params["file_id"]
    return virtual_files.content(used, caller(request), file_id, int(offset))


def _no_delete(request: Request) -> Response:
    file_id = request.path_params["file_id"]
    told = (
        f"file {file_id} is read from the queue, where it ends with its batch: `producer delete` "
        "removes it, and it expires by itself"
    )
    raise ApiError(400, told, code="file_not_deletable", param="file_id")


def routes() -> list[Route]:
    """Return the routes; they come before those of files/, which take any id."""
    virtual = "/v1/files/{file_id:virtual_file}"
    return [
        Route("/v1/batches", _create, methods=["POST"]),
        Route("/v1/batches", _list, methods=["GET"]),
        Route("/v1/batches/{batch_id}", _retrieve, methods=["GET"]),
        Route("/v1/batches/{batch_id}/cancel", _cancel, methods=["POST"]),
        Route(virtual, _virtual_file, methods=["GET"]),
        Route(virtual, _no_delete, methods=["DELETE"]),
        Route(f"{virtual}/content", _virtual_content, methods=["GET"]),
    ]
