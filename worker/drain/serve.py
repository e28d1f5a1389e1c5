"""One request from message to ending: read, check, run, describe."""

import asyncio
import time
from collections.abc import Sequence

from contract.errors import RequestFailed, RequestRejected
from contract.message import Delivery, inflate, read_body
from contract.openai.amounts import sequences_of
from contract.openai.body import text_is_answer
from contract.openai.lines import check_body, infer_url
from contract.results import success_meta
from worker.drain.admission import LARGE_BYTES, LargeMessages, SequenceLimit
from worker.drain.endings import Ending, failed
from worker.drain.events import Events, Started
from worker.drain.in_flight import Running
from worker.drain.supervisor import Supervisor
from worker.engine import EngineRequest
from worker.engine.preparation import PREPARATION, Preparation, PreparingRequests


def read_request(delivery: Delivery, served: Sequence[str]) -> EngineRequest:
    """Return a message's checked request; `served` names the models, none: any model.

    Raises:
        RequestRejected: its author must change it.
    """
    body = read_body(delivery)
    delivery.message = {}  # it may be megabytes, and is decoded now
    url = delivery.url or infer_url(body)
    body = check_body(url, body)
    model = body.get("model")
    if served and model and model not in served:
        raise RequestRejected(
            f"field body.model: this worker serves {', '.join(map(repr, served))}, not {model!r}; "
            f"send the request to the queue of a worker that serves {model!r}",
            code="model_not_found",
            field="body.model",
        )
    return EngineRequest(url, body, delivery.trace, delivery.tenant)


def timing_of(running: Running, popped_at: float) -> dict[str, float | int]:
    """Return the result's `warmq.timing`; queued_s counts from the batch's creation."""
    delivery = running.delivery
    found: dict[str, float | int] = {
        "engine_s": round(time.monotonic() - running.since, 4),
        "attempts": delivery.attempt,
    }
    if delivery.batch:
        found["queued_s"] = round(popped_at - int(delivery.created) / 1000, 3)
    return found


class Serving:
    """Runs requests in flight; a compressed body may inflate to `max_bytes`."""

    def __init__(
        self,
        supervisor: Supervisor,
        events: Events,
        sequences: SequenceLimit,
        preparing: PreparingRequests,
        max_bytes: int,
    ) -> None:
        #: Names of the models and adapters served; empty where any will do.
        self.names: Sequence[str] = ()
        self._supervisor, self._events = supervisor, events
        self._sequences, self._preparing = sequences, preparing
        self._max_bytes = max_bytes
        self._large = LargeMessages()

    async def run(self, running: Running, popped_at: float) -> Ending:
        """Run one request to its ending.

        Raises:
            EngineDead: the request did not end; it must be handed back.
            asyncio.CancelledError: the drain aborted it and knows why.
        """
        engine, delivery = self._supervisor.engine, running.delivery
        running.since = time.monotonic()
        preparation = Preparation(self._preparing, delivery.tenant)
        PREPARATION.set(preparation)  # of this request's own task
        try:
            if delivery.size > LARGE_BYTES or delivery.headers.get("compression"):
                await self._unpack(delivery, preparation)
            request = read_request(delivery, self.names)
            if delivery.listener:
                running.plain = text_is_answer(request.url, request.body)
            if self._events.subscribers(Started):
                self._events.publish(Started(delivery))
            if (count := sequences_of(request.body)) == 1:  # never waits: spared what that costs
                completion = await engine.generate(request, running.engine_id)
            else:
                async with self._sequences.entered(count):
                    completion = await engine.generate(request, running.engine_id)
        except (RequestRejected, RequestFailed) as error:
            return failed(delivery, error, timing=timing_of(running, popped_at))
        timing = timing_of(running, popped_at)
        return Ending(
            delivery,
            "completed",
            success_meta(delivery, completion.body, timing),
            prompt_tokens=completion.prompt_tokens,
            completion_tokens=completion.completion_tokens,
            times=timing,
        )

    async def _unpack(self, delivery: Delivery, preparation: Preparation) -> None:
        """Wait for the turn of a large message; inflate a compressed body in a thread."""
        with preparation:
            if delivery.size > LARGE_BYTES:
                await self._large.wait()
            if delivery.headers.get("compression"):
                await asyncio.to_thread(inflate, delivery, self._max_bytes)
                await self._large.wait()
