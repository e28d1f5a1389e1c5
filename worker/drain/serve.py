"""One request from message to ending: read, check, run, describe."""

from __future__ import annotations

import time
from collections.abc import Sequence

from contract.errors import RequestFailed, RequestRejected, WarmqError
from contract.message import Delivery, read_body
from contract.openai.lines import check_body, infer_url
from contract.results import failure_meta, success_meta
from worker.drain.endings import Ending
from worker.drain.in_flight import Running
from worker.engine import Engine, EngineRequest


def read_request(delivery: Delivery, served: Sequence[str]) -> EngineRequest:
    """Check what a message asks for, of models with these names; none: of any.

    Raises:
        RequestRejected: saying what its author must change.
    """
    body = read_body(delivery)
    delivery.message = {}  # it may be megabytes, and is decoded now
    url = delivery.url or infer_url(body)
    check_body(url, body)
    model = body.get("model")
    if served and model and model not in served:
        raise RequestRejected(
            f"field body.model: this worker serves {', '.join(map(repr, served))}, not {model!r}; "
            f"submit with --model {model} to the worker that serves it",
            code="model_not_found",
            field="body.model",
        )
    return EngineRequest(url, body)


class Timing:
    """Clocks of one delivery; seconds in the result's `warmq.timing`."""

    def __init__(self, delivery: Delivery, popped_at: float) -> None:
        self._delivery = delivery
        self._start = time.monotonic()
        self._queued = popped_at - int(delivery.created) / 1000 if delivery.batch else None

    def seconds(self) -> dict[str, float | int]:
        """Return queued_s (since the batch was created), engine_s and attempts so far."""
        seconds: dict[str, float | int] = {
            "engine_s": round(time.monotonic() - self._start, 4),
            "attempts": self._delivery.attempt,
        }
        if self._queued is not None:
            seconds["queued_s"] = round(self._queued, 3)
        return seconds


def failed(
    delivery: Delivery, error: WarmqError, outcome: str = "failed", timing: Timing | None = None
) -> Ending:
    """Return the ending of a request that has no response."""
    meta = failure_meta(
        delivery.request_id,
        error,
        batch=delivery.batch,
        custom_id=delivery.custom_id,
        line=delivery.line,
        timing=timing.seconds() if timing else None,
        revoked=outcome != "failed",
    )
    keep = not isinstance(error, RequestRejected)
    return Ending(delivery, outcome, meta, keep)


async def serve(
    running: Running, engine: Engine, served: Sequence[str], popped_at: float
) -> Ending:
    """Run one request in flight to its ending.

    Raises:
        EngineDead: the request did not end; it must be handed back.
        asyncio.CancelledError: the drain aborted it and knows why.
    """
    delivery = running.delivery
    timing = Timing(delivery, popped_at)
    try:
        request = read_request(delivery, served)
        completion = await engine.generate(request, running.engine_id)
    except (RequestRejected, RequestFailed) as error:
        return failed(delivery, error, timing=timing)
    meta = success_meta(delivery, completion.body, timing.seconds())
    return Ending(
        delivery,
        "completed",
        meta,
        prompt_tokens=completion.prompt_tokens,
        completion_tokens=completion.completion_tokens,
    )
