"""The routes of batches, and of files made on request."""

from __future__ import annotations

from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.convertors import Convertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from contract.batch import Batch as QueueBatch
from gateway.batches.api import batches, virtual_files
from gateway.http.errors import invalid
from gateway.http.json_api import caller, page_limit, reply, services

#: Batches on a page of the list: the default, and the most that a caller may ask for.
DEFAULT_LIMIT, MOST = 20, 100


class _VirtualId(Convertor[str]):
    """Matches ids of files made on request; gateway/files has all other routes of files."""

    regex = virtual_files.ID

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("virtual_file", _VirtualId())


async def _create(request: Request) -> Response:
    body, idempotency = await request.body(), request.scope.get("warmq.idempotency", "")
    return reply(
        await run_in_threadpool(
            batches.create, services(request), caller(request), body, idempotency
        )
    )


def _list(request: Request) -> Response:
    query = request.query_params
    limit = page_limit(query.get("limit"), DEFAULT_LIMIT, MOST)
    return reply(batches.page(services(request), caller(request), query.get("after", ""), limit))


def _retrieve(request: Request) -> Response:
    asked = request.query_params.get("partial") or request.headers.get("x-partial-results") or ""
    batch_id, partial = request.path_params["batch_id"], asked.lower() in ("true", "1")
    return reply(batches.retrieve(services(request), caller(request), batch_id, partial=partial))


def _cancel(request: Request) -> Response:
    gateway = services(request)
    batch, view = batches.cancel(gateway, caller(request), request.path_params["batch_id"])
    response = reply(batch)
    if isinstance(view.source, QueueBatch) and batch.status == "cancelling":
        # Ending a million requests takes longer than clients wait. If this process dies, workers
        # end the remaining requests when they take them.
        response.background = BackgroundTask(gateway.batches.cancel, view.source)
    return response


def _virtual_file(request: Request) -> Response:
    file_id = request.path_params["file_id"]
    return reply(virtual_files.file_object(services(request), caller(request), file_id))


def _virtual_content(request: Request) -> Response:
    offset = request.query_params.get("offset", "0")
    if not (offset.isdecimal() and offset.isascii() and len(offset) < 16):
        message = f"offset is {offset[:40]!r}; give the X-Last-Line of an earlier answer"
        raise invalid(message, "offset")
    file_id = request.path_params["file_id"]
    return virtual_files.content(services(request), caller(request), file_id, int(offset))


def _no_delete(request: Request) -> Response:
    file_id = request.path_params["file_id"]
    message = (
        f"file {file_id} is generated from the batch in the queue: `producer delete` removes both, "
        "and they expire by themselves"
    )
    raise invalid(message, "file_id", "file_not_deletable")


def routes() -> list[Route]:
    """Return the routes, which must come before gateway.files': those match any id."""
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
