"""Routes of online requests and of models."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from contract.openai.body import BODY_TYPES
from gateway.http.http import caller, reply
from gateway.online.endpoint import Endpoint
from gateway.online.online import Online
from gateway.online.protocol import ModelList


async def _models(request: Request) -> Response:
    online: Online = request.app.state.online
    return reply(ModelList(await online.models.every(caller(request).models)))


async def _model(request: Request) -> Response:
    online: Online = request.app.state.online
    name = request.path_params["model"]
    return reply(await online.models.one(name, caller(request).models))


def routes() -> list[Route]:
    """Return the routes: one for each URL whose bodies are known, and those of models."""
    return [
        *(Route(url, Endpoint(url), methods=["POST"]) for url in BODY_TYPES),
        Route("/v1/models", _models),
        Route("/v1/models/{model:path}", _model),
    ]
