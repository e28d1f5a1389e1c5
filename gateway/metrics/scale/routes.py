"""`GET /warmq/v1/scale`: one JSON for KEDA's trigger `metrics-api`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from contract.naming import queue_name
from gateway.http.http import caller, reply, services
from gateway.http.limits import check_model
from gateway.metrics.scale.protocol import Scale
from gateway.redis.fleet import Loads


def _scale(request: Request) -> Response:
    """Answer for `?model=`, or for the default queue.

    The model need not be served now: one that was scaled to zero is asked for just then.
    """
    model, used = request.query_params.get("model", ""), services(request)
    if model or caller(request).models is not None:
        check_model(caller(request), model)
    queue = queue_name(model, used.settings.queue)
    load = Loads.beside(used.batches).load(queue)
    told = Scale(
        queue=queue, waiting=load.waiting, in_flight=load.in_flight,
        requests=load.waiting + load.in_flight, mean_tokens=load.mean_tokens, tokens=load.tokens,
        workers=load.workers, slots=load.slots,
    )  # fmt: skip
    return reply(told, headers={"Cache-Control": "no-store"})


def routes() -> list[Route]:
    """Return the route."""
    return [Route("/warmq/v1/scale", _scale)]
