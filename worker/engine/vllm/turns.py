"""Makes large requests take turns in vLLM's tokenizer thread, and limits their engine slots.

vLLM has one thread for all tokenizing, and sends it all prompts of a request at once: a request
that comes after one with 512 prompts of 14 KB waits for 4 s. It also starts all prompts of a
request in one iteration of the event loop, and checks all of them again whenever one has ended.
Here, a request of many prompts has at most one prompt in that thread, long prompts of all requests
go one after the other, and a request starts a prompt only while it can get a slot for it.

vLLM's scheduler runs sequences in the order in which they come. So the sequences of a request with
`n` answers, or with a list of prompts, could delay other requests for minutes. Here each of them
waits, by priority, for one of the slots that such requests share. The other slots are reserved for
requests of one sequence, which never wait here.
"""

import asyncio
import logging
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from contextvars import ContextVar
from functools import wraps
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any

from contract.openai.amounts import sequences_of
from worker.engine import multi_sequence_slots
from worker.engine.preparation import waiting
from worker.engine.vllm.limits import lengths
from worker.engine.vllm.names import EngineDeadError
from worker.engine.vllm.priorities import PRIORITY
from worker.engine.vllm.stats import Progress

log = logging.getLogger(__name__)

#: The lock of the current task's request if it has several sequences; tasks of vLLM inherit it.
REQUEST_LOCK: ContextVar[asyncio.Lock | None] = ContextVar("request_lock", default=None)
#: Most characters of a short prompt; longer prompts take turns.
SHORT_PROMPT = 32_768
#: Methods of vLLM's renderer that use the tokenizer thread: from text to tokens, and back.
TOKENIZER_METHODS = ("_tokenize_prompt_async", "_async_tokenizer_decode")
#: The method of vLLM's pooling processors that uses the thread without the renderer.
RENDER = "render_async"
#: Fields with texts in the arguments of these methods. `_async_tokenizer_decode` gets a list of
#: tokens instead.
TEXT_FIELDS = ("prompt", "prompts", "conversations", "data_1", "data_2")
#: Prompts that are started, or cancelled, in one iteration of the event loop.
AT_ONCE = 16
#: The name of vLLM's function that merges the outputs of several prompts.
MERGE = "merge_async_iterators"


def take_turns(renderer: Any, slots: int, pooling: Sequence[Any] = ()) -> None:
    """Make large requests take turns in the tokenizer thread, with at most `slots` running prompts.

    vLLM's `pooling` classes use the thread without the renderer. A method of TOKENIZER_METHODS, or
    RENDER, that a release of vLLM lacks is not wrapped.
    """
    long_prompts = asyncio.Lock()
    for serving in pooling:
        if hasattr(processor := getattr(serving, "io_processor", None), RENDER):
            setattr(processor, RENDER, _in_turn(getattr(processor, RENDER), long_prompts))
    for name in TOKENIZER_METHODS:
        if hasattr(renderer, name):
            setattr(renderer, name, _in_turn(getattr(renderer, name), long_prompts))
        else:
            extra = {"action": "prompts_unbounded"}
            log.warning("this vLLM tokenizes all prompts of a request at once", extra=extra)
    for name, module in list(sys.modules.items()):  # modules that use MERGE
        if name.startswith("vllm.entrypoints.") and hasattr(module, MERGE):
            merge = getattr(module, MERGE)
            setattr(module, MERGE, _gradually(getattr(merge, "replaces", merge), slots))


def begin(sequences: int) -> None:
    """Make the lock of the current task's request, if it has several sequences."""
    REQUEST_LOCK.set(asyncio.Lock() if sequences > 1 else None)


def _in_turn(make: Any, long_prompts: asyncio.Lock) -> Any:
    @wraps(make)
    async def in_turn(argument: Any, *args: Any) -> Any:
        request_lock = REQUEST_LOCK.get()
        is_long = _length(argument) > SHORT_PROMPT
        if request_lock is None and not is_long:
            return await make(argument, *args)
        # A request of several sequences does not count as waiting: some may be in the engine.
        with waiting() if request_lock is None else nullcontext():
            async with request_lock or nullcontext(), long_prompts if is_long else nullcontext():
                return await make(argument, *args)

    return in_turn


def _length(argument: Any) -> int:
    """Return the number of characters of texts, or the number of tokens."""
    if not isinstance(argument, dict):
        return len(argument)
    return sum(sum(lengths(argument[name])) for name in TEXT_FIELDS if name in argument)


def _gradually(merge: Any, slots: int) -> Any:
    """Wrap vLLM's function so that at most `slots` of its iterators run at a time."""

    def merged(*iterators: AsyncGenerator[Any, None]) -> AsyncGenerator[tuple[int, Any], None]:
        if len(iterators) <= AT_ONCE:
            outputs: AsyncGenerator[tuple[int, Any], None] = merge(*iterators)
            return outputs
        return _Merged(iterators, slots).outputs()

    merged.replaces = merge  # type: ignore[attr-defined]  # used when an engine is built again
    return merged


class _Merged:
    """Merges the outputs of many iterators; each comes with the number of its iterator."""

    def __init__(self, iterators: Sequence[AsyncGenerator[Any, None]], slots: int) -> None:
        self._waiting = iter(enumerate(iterators))
        self._left, self._slots = len(iterators), slots
        self._running: set[asyncio.Task[None]] = set()
        #: Outputs with their iterator's number; for an ended iterator None, or its error.
        self._events: asyncio.Queue[tuple[int, Any] | BaseException | None] = asyncio.Queue()

    async def outputs(self) -> AsyncGenerator[tuple[int, Any], None]:
        """Yield the outputs. The first error ends all iterators."""
        try:
            while self._left:
                await self._start()
                event = await self._events.get()
                if event is None:
                    self._left -= 1
                elif isinstance(event, BaseException):
                    raise event
                else:
                    yield event
        finally:
            await self._cancel()

    async def _start(self) -> None:
        """Start iterators while there are free slots, AT_ONCE in one iteration of the loop."""
        started = 0
        while len(self._running) < self._slots:
            place, iterator = next(self._waiting, (0, None))
            if iterator is None:
                return
            task = asyncio.create_task(self._run(place, iterator))
            self._running.add(task)
            task.add_done_callback(self._on_end)
            started += 1
            if started % AT_ONCE == 0:
                await asyncio.sleep(0)

    async def _run(self, place: int, iterator: AsyncGenerator[Any, None]) -> None:
        async for output in iterator:
            self._events.put_nowait((place, output))

    def _on_end(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._events.put_nowait(None if task.cancelled() else task.exception())

    async def _cancel(self) -> None:
        """Cancel the running tasks, AT_ONCE at a time; each aborts its prompt in the engine."""
        try:
            while self._running:
                batch = list(self._running)[:AT_ONCE]
                for task in batch:
                    task.cancel()
                await asyncio.wait(batch)
                self._running.difference_update(batch)
        finally:
            for task in self._running:  # after another cancellation nothing waits for them
                task.cancel()


# -- slots of the engine -------------------------------------------------------------

#: Attributes of vLLM's OutputProcessor that SequenceSlots uses.
PROCESSOR_ATTRIBUTES = ("add_request", "abort_requests", "propagate_error", "request_states")


class SequenceSlots:
    """The slots of one engine that requests of several sequences share."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._slots = 1
        #: Ids of the sequences in the engine. Ended ones are removed when a sequence needs a slot.
        self._inside: set[str] = set()
        self._entering: set[str] = set()
        self._arrivals = count()
        #: A heap of waiting sequences: priority in the queue, number of the arrival, id, future.
        self._waiting: list[tuple[int, int, str, asyncio.Future[None]]] = []

    def guard(self, engine: Any, front_ends: int, pooling: Sequence[Any] = ()) -> None:
        """Wrap what adds sequences to an AsyncLLM. A release without `_add_request` is not changed.

        Each of `front_ends` processes has its part of the slots.
        """
        config, processor = engine.vllm_config, engine.output_processor
        slots = config.scheduler_config.max_num_seqs * config.parallel_config.data_parallel_size
        self._slots = multi_sequence_slots(slots // front_ends)
        take_turns(getattr(engine, "renderer", None), self._slots, pooling)
        used = all(hasattr(processor, name) for name in PROCESSOR_ATTRIBUTES)
        if not used or not hasattr(engine, "_add_request"):
            extra = {"action": "sequences_unbounded"}
            log.warning("this vLLM takes all sequences of a request at once", extra=extra)
            return
        self._engine, self._processor = engine, processor
        self._add, self._abort = engine._add_request, processor.abort_requests
        self._propagate = processor.propagate_error
        engine._add_request = self.add
        self._send = engine.engine_core.add_request_async
        engine.engine_core.add_request_async = self.send
        processor.abort_requests, processor.propagate_error = (
            self._abort_requests,
            self._propagate_error,
        )
        self._progress.ended = self.let_in

    def begin(self, body: Mapping[str, Any]) -> bool:
        """Note how many sequences a request has; return whether there are slots for all of them."""
        sequences = sequences_of(body)
        begin(sequences)
        return sequences <= self._slots or sequences == 1

    async def add(
        self, request: Any, prompt: Any, parent: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Add a sequence to the engine.

        A sequence of a request with several sequences waits for a slot first.
        """
        if REQUEST_LOCK.get() is None:
            return await self._add(request, prompt, parent, *args, **kwargs)
        async with self._place(request.request_id, parent):
            return await self._add(request, prompt, parent, *args, **kwargs)

    async def send(self, request: Any) -> None:
        """Send a sequence to the engine; since vLLM 0.32 those of `n` answers come only here."""
        if REQUEST_LOCK.get() is None or request.request_id in self._entering:
            await self._send(request)
            return
        async with self._place(request.request_id):
            await self._send(request)

    @asynccontextmanager
    async def _place(self, name: str, parent: Any = None) -> AsyncIterator[None]:
        """Wait for a slot; after the context the sequence is in the engine."""
        await self._enter(name, parent)
        try:
            yield
        finally:
            self._entering.discard(name)
            self._inside.add(name)

    async def _enter(self, name: str, parent: Any) -> None:
        slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = (PRIORITY.get(), next(self._arrivals), name, slot)
        heappush(self._waiting, waiter)
        self.let_in()
        if slot.done():
            return
        try:
            await slot
        except asyncio.CancelledError:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
                heapify(self._waiting)
            self._entering.discard(name)
            self.let_in()
            # vLLM itself aborts a request only after all its sequences have been added.
            if parent is not None and not self._engine.errored:
                await self._engine.abort(parent.request_id, internal=True)
            raise

    def let_in(self) -> None:
        """Give the slots of sequences that have ended to waiting sequences."""
        if not self._waiting:
            return
        self._inside = {name for name in self._inside if name in self._processor.request_states}
        while self._waiting and len(self._inside) + len(self._entering) < self._slots:
            _, _, name, slot = heappop(self._waiting)
            if not slot.done():
                self._entering.add(name)
                slot.set_result(None)

    def _abort_requests(self, *args: Any, **kwargs: Any) -> Any:
        """Abort requests as vLLM does, then fill the slots.

        Otherwise slots are filled after a step, and an engine without requests makes none.
        """
        try:
            return self._abort(*args, **kwargs)
        finally:
            self.let_in()

    def _propagate_error(self, error: Exception) -> None:
        """End the waiting sequences with an error, as vLLM ends the running ones."""
        self._propagate(error)
        while self._waiting:
            *_, slot = self._waiting.pop()
            if not slot.done():
                slot.set_exception(EngineDeadError())
