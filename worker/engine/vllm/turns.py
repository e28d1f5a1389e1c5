"""Let large requests take turns, in vLLM's tokenizer thread and at its engine.

vLLM has one thread for all tokenizing and gives it all prompts of a request at once: the request
after one of 512 prompts of 14 KB waits for 4 s. It also starts all prompts of a request in one turn
of the event loop, and tests all of them again whenever one has ended. Here a request of many
prompts has one in that thread at a time, long prompts of all requests go one after the other, and a
request starts as many prompts as it can get slots.

vLLM's scheduler serves sequences in their order, so those of a request with `n` answers or a list
of prompts would delay other requests for minutes. Here each of them waits for one of the slots that
such requests share; the rest are left to requests of one sequence, which never wait here.
"""

import asyncio
import logging
import sys
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from functools import wraps
from typing import Any

from contract.openai.amounts import sequences_of
from worker.engine import multi_sequence_slots
from worker.engine.preparation import waiting
from worker.engine.vllm.limits import lengths
from worker.engine.vllm.names import EngineDeadError
from worker.engine.vllm.stats import Progress

log = logging.getLogger(__name__)

#: The lock of the task's request, if it has many sequences; the tasks that vLLM makes inherit it.
TURN: ContextVar[asyncio.Lock | None] = ContextVar("turn", default=None)
#: Most characters of a short prompt.
LONGEST = 32_768
#: The renderer's methods that use the thread: text to tokens, tokens to text.
USES = ("_tokenize_prompt_async", "_async_tokenizer_decode")
RENDER = "render_async"
#: Where their argument has texts; the last method gets the text itself.
TEXTS = ("prompt", "prompts", "conversations", "data_1", "data_2")
#: Prompts that are started, or given up, in one turn of the event loop.
AT_ONCE = 16
MERGE = "merge_async_iterators"


def take_turns(renderer: Any, slots: int, pooling: Sequence[Any] = ()) -> None:
    """Let large requests take turns at vLLM's tokenizer thread, each with `slots` running prompts.

    vLLM's serving classes for pooling use the thread without the renderer. A release without these
    methods is left as it is.
    """
    long = asyncio.Lock()
    for serving in pooling:
        if hasattr(processor := getattr(serving, "io_processor", None), RENDER):
            setattr(processor, RENDER, _in_turn(getattr(processor, RENDER), long))
    for name in USES:
        if hasattr(renderer, name):
            setattr(renderer, name, _in_turn(getattr(renderer, name), long))
        else:
            extra = {"action": "prompts_unbounded"}
            log.warning("this vLLM tokenizes all prompts of a request at once", extra=extra)
    for name, module in list(sys.modules.items()):  # those that merge the answers of many prompts
        if name.startswith("vllm.entrypoints.") and hasattr(module, MERGE):
            merge = getattr(module, MERGE)
            setattr(module, MERGE, _gradually(getattr(merge, "replaces", merge), slots))


def begin(sequences: int) -> None:
    """Note how many sequences the task's request has."""
    TURN.set(asyncio.Lock() if sequences > 1 else None)


def _in_turn(make: Any, long: asyncio.Lock) -> Any:
    @wraps(make)
    async def in_turn(given: Any, *more: Any) -> Any:
        own = TURN.get()
        is_long = _length(given) > LONGEST
        if own is None and not is_long:
            return await make(given, *more)
        # A request of many prompts has some of them in the engine meanwhile.
        with waiting() if own is None else nullcontext():
            async with own or nullcontext(), long if is_long else nullcontext():
                return await make(given, *more)

    return in_turn


def _length(given: Any) -> int:
    """Return the number of characters, or of tokens."""
    if not isinstance(given, dict):
        return len(given)
    return sum(sum(lengths(given[name])) for name in TEXTS if name in given)


def _gradually(merge: Any, slots: int) -> Any:
    """Wrap vLLM's function: at most `slots` of its iterators run."""

    def merged(*iterators: AsyncGenerator[Any, None]) -> AsyncGenerator[tuple[int, Any], None]:
        if len(iterators) <= AT_ONCE:
            found: AsyncGenerator[tuple[int, Any], None] = merge(*iterators)
            return found
        return _Merged(iterators, slots).outputs()

    merged.replaces = merge  # type: ignore[attr-defined]  # an engine may be built again
    return merged


class _Merged:
    """Merges the outputs of many iterators, each with its iterator's place."""

    def __init__(self, iterators: Sequence[AsyncGenerator[Any, None]], slots: int) -> None:
        self._waiting = iter(enumerate(iterators))
        self._left, self._slots = len(iterators), slots
        self._running: set[asyncio.Task[None]] = set()
        #: Outputs by place; None, or an error, of an iterator that has ended.
        self._found: asyncio.Queue[tuple[int, Any] | BaseException | None] = asyncio.Queue()

    async def outputs(self) -> AsyncGenerator[tuple[int, Any], None]:
        """Yield the outputs; the first error ends all."""
        try:
            while self._left:
                await self._start()
                found = await self._found.get()
                if found is None:
                    self._left -= 1
                elif isinstance(found, BaseException):
                    raise found
                else:
                    yield found
        finally:
            await self._cancel()

    async def _start(self) -> None:
        """Fill the slots, AT_ONCE in a turn of the loop."""
        started = 0
        while len(self._running) < self._slots:
            place, iterator = next(self._waiting, (0, None))
            if iterator is None:
                return
            task = asyncio.create_task(self._run(place, iterator))
            self._running.add(task)
            task.add_done_callback(self._ended)
            started += 1
            if started % AT_ONCE == 0:
                await asyncio.sleep(0)

    async def _run(self, place: int, iterator: AsyncGenerator[Any, None]) -> None:
        async for output in iterator:
            self._found.put_nowait((place, output))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._found.put_nowait(None if task.cancelled() else task.exception())

    async def _cancel(self) -> None:
        """Cancel what runs, AT_ONCE in a turn; each task aborts its prompt in the engine."""
        try:
            while self._running:
                some = list(self._running)[:AT_ONCE]
                for task in some:
                    task.cancel()
                await asyncio.wait(some)
                self._running.difference_update(some)
        finally:
            for task in self._running:  # cancelled again: nobody waits any more
                task.cancel()


# -- slots of the engine -------------------------------------------------------------

ENGINE_USES = ("add_request", "abort_requests", "propagate_error", "request_states")


class SequenceSlots:
    """The slots of one engine that requests of many sequences share."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._slots = 1
        #: Ids of sequences in the engine; ended ones stay until one waits for a slot.
        self._inside: set[str] = set()
        self._entering: set[str] = set()
        self._waiting: deque[tuple[str, asyncio.Future[None]]] = deque()

    def guard(self, engine: Any, front_ends: int, pooling: Sequence[Any] = ()) -> None:
        """Wrap an AsyncLLM's `_add_request`; a release without it is left as it is.

        Each of `front_ends` processes has its part of the slots.
        """
        config, processor = engine.vllm_config, engine.output_processor
        slots = config.scheduler_config.max_num_seqs * config.parallel_config.data_parallel_size
        self._slots = multi_sequence_slots(slots // front_ends)
        take_turns(getattr(engine, "renderer", None), self._slots, pooling)
        used = all(hasattr(processor, name) for name in ENGINE_USES)
        if not used or not hasattr(engine, "_add_request"):
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
        """Note the task's request; return whether the engine may have all of it immediately."""
        sequences = sequences_of(body)
        begin(sequences)
        return sequences <= self._slots or sequences == 1

    async def add(
        self, request: Any, prompt: Any, parent: Any = None, *more: Any, **named: Any
    ) -> Any:
        """Give the engine a sequence, of a request of many once there is a slot."""
        if TURN.get() is None:
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
        """Give the slots of sequences that have ended to those that wait."""
        if not self._waiting:
            return
        self._inside = {name for name in self._inside if name in self._processor.request_states}
        while self._waiting and len(self._inside) + len(self._entering) < self._slots:
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
        """End the waiting sequences as vLLM ends the running ones."""
        self._propagate(error)
        while self._waiting:
            _, turn = self._waiting.popleft()
            if not turn.done():
                turn.set_exception(EngineDeadError())
