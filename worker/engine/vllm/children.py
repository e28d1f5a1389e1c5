"""Places in the engine for what requests of many sequences are made of.

vLLM hands all `n` answers of a request to its scheduler at once, and all prompts of a list. The
scheduler serves whoever came first: a hundred long ones before them, and others wait for minutes.
Here each sequence of such a request waits until one of the places that they share is free, so that
some slots are always left to requests of one sequence. These are not looked at.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from contract.openai.amounts import sequences_of
from worker.engine import places_of_many
from worker.engine.vllm.names import EngineDeadError
from worker.engine.vllm.progress import Progress
from worker.engine.vllm.turns import begin, take_turns

log = logging.getLogger(__name__)

#: Whether the task runs a request of many sequences.
MANY: ContextVar[bool] = ContextVar("many", default=False)
USED = ("add_request", "abort_requests", "propagate_error", "request_states")


class Children:
    """The places of one engine."""

    def __init__(self, progress: Progress) -> None:
        """Prepare; `progress` is told of each step of the engine."""
        self._progress = progress
        self._places = 1
        #: Ids of sequences in the engine, ended ones among them until somebody waits for a place.
        self._inside: set[str] = set()
        self._entering: set[str] = set()
        self._waiting: deque[tuple[str, asyncio.Future[None]]] = deque()

    def guard(self, engine: Any, front_ends: int, pooling: Sequence[Any] = ()) -> None:
        """Stand before an AsyncLLM's `_add_request`; a release without it goes on as it is.

        Args:
            engine: vLLM's AsyncLLM.
            front_ends: processes that feed the engine, each with its part of the slots.
            pooling: vLLM's serving classes for pooling.
        """
        config, processor = engine.vllm_config, engine.output_processor
        slots = config.scheduler_config.max_num_seqs * config.parallel_config.data_parallel_size
        self._places = places_of_many(slots // front_ends)
        take_turns(getattr(engine, "renderer", None), self._places, pooling)
        if not hasattr(engine, "_add_request") or not all(hasattr(processor, n) for n in USED):
            extra = {"action": "sequences_unbounded"}
            log.warning("this vLLM takes all sequences of a request at once", extra=extra)
            return
        self._engine, self._processor = engine, processor
        self._add, self._abort = engine._add_request, processor.abort_requests
        self._propagate = processor.propagate_error
        engine._add_request = self.add
        processor.abort_requests, processor.propagate_error = self._aborted, self._failed
        self._progress.ended = self.let_in

    def begin(self, body: Mapping[str, Any]) -> bool:
        """Note what the task runs; return whether all of it may be given to the engine at once."""
        sequences = sequences_of(body)
        MANY.set(sequences > 1)
        begin(sequences)
        return sequences <= self._places or sequences == 1

    async def add(
        self, request: Any, prompt: Any, parent: Any = None, *more: Any, **named: Any
    ) -> Any:
        """Give the engine one sequence, of a request of many once there is a place."""
        if not MANY.get():
            return await self._add(request, prompt, parent, *more, **named)
        name = request.request_id
        await self._enter(name, parent)
        try:
            return await self._add(request, prompt, parent, *more, **named)
        finally:
            self._entering.discard(name)
            self._inside.add(name)

    async def _enter(self, name: str, parent: Any) -> None:
        turn = (name, asyncio.get_running_loop().create_future())
        self._waiting.append(turn)
        self.let_in()
        if turn[1].done():
            return
        try:
            await turn[1]
        except asyncio.CancelledError:
            if turn in self._waiting:
                self._waiting.remove(turn)
            self._entering.discard(name)
            self.let_in()
            # vLLM aborts a request only once all of it is inside.
            if parent is not None and not self._engine.errored:
                await self._engine.abort(parent.request_id, internal=True)
            raise

    def let_in(self) -> None:
        """Give the places of sequences that have ended to those that wait."""
        if not self._waiting:
            return
        self._inside = {name for name in self._inside if name in self._processor.request_states}
        while self._waiting and len(self._inside) + len(self._entering) < self._places:
            name, turn = self._waiting.popleft()
            if not turn.done():
                self._entering.add(name)
                turn.set_result(None)

    def _aborted(self, *given: Any, **named: Any) -> Any:
        """Abort requests as vLLM does; an engine that has nothing left makes no step."""
        try:
            return self._abort(*given, **named)
        finally:
            self.let_in()

    def _failed(self, error: Exception) -> None:
        """Let those that wait end as those that run do."""
        self._propagate(error)
        while self._waiting:
            _, turn = self._waiting.popleft()
            if not turn.done():
                turn.set_exception(EngineDeadError())
