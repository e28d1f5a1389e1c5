"""X."""

from __future__ import annotations

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from contract.naming import queue_name
from gateway.http.http import caller, reply, services
from gateway.http.limits import check_model
from gateway.redis.fleet import Loads


class Scale(Struct, frozen=True):
    """What a model's queue holds: requests `waiting` and `in_flight`, both together in `tokens`.

    A request is counted as `mean_tokens`: what those of the queue cost lately, prompt and answer;
    as one token at least.
    `workers` serve the queue now, with `slots` requests at once.
    """

    queue: str
    waiting: int
    in_flight: int
    requests: int
    mean_tokens: float
    tokens: int
    workers: int
    slots: int


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
