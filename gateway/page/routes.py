"""Routes of the page."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.page import (
    batch,
    batches,
    dead,
    entering,
    overview,
    requests,
    rerun,
    stream,
    submit,
    whole_files,
)
from gateway.page.rendering import ASSETS, HEADERS, VERSION
from gateway.page.view import shows, writes


async def _asset(request: Request) -> Response:
    found = ASSETS.get(request.path_params["name"])
    if found is None:
        return Response(status_code=404, headers=HEADERS)
    media, content = found
    fresh = request.path_params["version"] == VERSION
    kept = "public, max-age=31536000, immutable" if fresh else "no-cache"
    return Response(content, headers=HEADERS | {"cache-control": kept}, media_type=media)


_retry = writes(rerun.retry, whole_files.in_turn)


def routes() -> list[Route]:
    """Return the routes."""
    return [
        Route("/ui", shows(overview.overview), methods=["GET"]),
        Route("/ui/login", entering.login, methods=["GET", "POST"]),
        Route("/ui/logout", entering.logout, methods=["POST"]),
        Route("/ui/assets/{version}/{name}", _asset, methods=["GET"]),
        Route("/ui/workers", shows(overview.workers), methods=["GET"]),
        Route("/ui/batches", shows(batches.batches), methods=["GET"]),
        Route("/ui/batches/{batch_id}", shows(batch.batch), methods=["GET"]),
        Route("/ui/batches/{batch_id}/request", shows(requests.request), methods=["GET"]),
        Route("/ui/batches/{batch_id}/download/{kind}", shows(batch.download), methods=["GET"]),
        Route("/ui/batches/{batch_id}/retry", _retry, methods=["POST"]),
        Route("/ui/tenants", shows(overview.tenants), methods=["GET"]),
        Route("/ui/dead", shows(dead.dead), methods=["GET"]),
        Route("/ui/dead", writes(dead.change), methods=["POST"]),
        Route("/ui/submit", shows(submit.submit, submit.in_turn), methods=["GET"]),
        Route("/ui/submit", submit.upload, methods=["POST"]),
        Route("/ui/submit/start", writes(submit.start), methods=["POST"]),
        Route("/ui/live", stream.live, methods=["GET"]),
        Route("/ui/batches/{batch_id}/cancel", writes(batch.cancel), methods=["POST"]),
    ]
