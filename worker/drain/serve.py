"""Runs one request: reads its message, checks it, runs it in the engine, makes its ending."""

import asyncio
import time
from collections.abc import Sequence

from contract.errors import RequestFailed, RequestRejected
from contract.message import Delivery, inflate, read_body
from contract.openai.amounts import sequences_of
from contract.openai.body import prompt_beginning, text_is_answer
from contract.openai.lines import check_body, infer_url
from contract.openai.prompts import MESSAGE_TOKENS, text_length
from contract.results import is_cut, is_last_cut, success_meta
from worker.drain.admission import LARGE_BYTES, LargeMessages, SequenceLimit
from worker.drain.endings import Ending, failed
from worker.drain.events import Events, Started
from worker.drain.in_flight import Running
from worker.drain.known import Offers
from worker.drain.supervisor import Supervisor
from worker.engine import EngineRequest
from worker.engine.preparation import PREPARATION, Preparation, PreparingRequests


def read_request(delivery: Delivery, served: Sequence[str]) -> EngineRequest:
    """Return a message's checked request; `served` names the allowed models, () allows all.

    Raises:
        RequestRejected: the request's author must change it.
    """
    body = read_body(delivery)
    delivery.message = {}  # frees memory: the message may be megabytes, and its body is decoded
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
    return EngineRequest(
        url, body, delivery.trace, delivery.tenant, delivery.priority, bool(delivery.listener)
    )


def timing_of(running: Running, popped_at: float) -> dict[str, float | int]:
    """Return the result's `warmq.timing`; `queued_s` counts from the batch's creation or retry."""
    delivery = running.delivery
    timing: dict[str, float | int] = {
        "engine_s": round(time.monotonic() - running.since, 4),
        "attempts": delivery.attempt,
    }
    if delivery.batch:
        queued_at = int(delivery.created)
        if delivery.requeued_at:
            queued_at = max(queued_at, delivery.requeued_at)
        timing["queued_s"] = round(popped_at - queued_at / 1000, 3)
    return timing


class Serving:
    """Runs requests in flight; `max_bytes` limits the size of a decompressed body."""

    def __init__(
        self,
        supervisor: Supervisor,
        events: Events,
        sequences: SequenceLimit,
        preparing: PreparingRequests,
        max_bytes: int,
    ) -> None:
        #: The names of the served model and adapters; empty: a request may name any model.
        self.names: Sequence[str] = ()
        self._supervisor, self._events = supervisor, events
        self._sequences, self._preparing = sequences, preparing
        self._max_bytes = max_bytes
        self._large = LargeMessages()
        #: The answers that may be reused; None without WARMQ_KNOWN_ANSWERS.
        self.offers: Offers | None = None

    async def run(self, running: Running, popped_at: float) -> Ending:
        """Run one request to its ending.

        Raises:
            EngineDead: the engine died; the request must be handed back.
            asyncio.CancelledError: the drain aborted the request (`running.abort`).
        """
        engine, delivery = self._supervisor.engine, running.delivery
        running.since = time.monotonic()
        preparation = Preparation(self._preparing, delivery.tenant)
        PREPARATION.set(preparation)  # a context variable: each request has its own task
        try:
            if delivery.size > LARGE_BYTES or delivery.headers.get("compression"):
                await self._unpack(delivery, preparation)
            number = self.offers.hash_of(delivery) if self.offers is not None else None
            request = read_request(delivery, self.names)
            if delivery.listener:
                running.streams_answer = text_is_answer(request.url, request.body)
            if self._events.subscribers(Started):
                self._events.publish(Started(delivery))
            if (count := sequences_of(request.body)) == 1:  # faster: a single sequence never waits
                completion = await engine.generate(request, running.engine_id)
            else:
                async with self._sequences.entered(count, request.priority):
                    completion = await engine.generate(request, running.engine_id)
        except (RequestRejected, RequestFailed) as error:
            return failed(delivery, error, timing=timing_of(running, popped_at))
        timing = timing_of(running, popped_at)
        prompt = prompt_beginning(request.body) if delivery.batch else ""
        # With one choice, is_last_cut and is_cut return the same, and is_last_cut is faster.
        ended_at_limit = is_last_cut if count == 1 else is_cut
        cut = completion.completion_tokens > 0 and ended_at_limit(completion.body)
        characters, messages = text_length(request.body)
        digest = ""
        if number is not None and self.offers is not None and not cut:
            digest = self.offers.digest_of(request)
        return Ending(
            delivery,
            "completed",
            success_meta(delivery, completion.body, timing, prompt, digest),
            prompt_tokens=completion.prompt_tokens,
            completion_tokens=completion.completion_tokens,
            times=timing,
            cut=cut,
            known=(digest, number) if digest and number is not None else None,
            characters=characters,
            text_tokens=completion.prompt_tokens - MESSAGE_TOKENS * messages if characters else 0,
        )

    async def _unpack(self, delivery: Delivery, preparation: Preparation) -> None:
        """Wait until a large message may be read; decompress a body in a thread."""
        with preparation:
            if delivery.size > LARGE_BYTES:
                await self._large.wait()
            if delivery.headers.get("compression"):
                await asyncio.to_thread(inflate, delivery, self._max_bytes)
                await self._large.wait()  # a small message may have a large body
