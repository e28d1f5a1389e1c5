"""Compiles the constraints of requests in another process before the engine gets them.

A constraint is a JSON schema, regex, choice or grammar that an answer has to follow. The client
determines how long its compilation takes: for a JSON schema of 60 bytes it can be minutes. vLLM
validates constraints on the event loop, and compiles them in a thread of EngineCore that nothing
can stop. outlines even holds the GIL while it computes, so that the whole EngineCore stops (2 s for
3,000 properties); xgrammar 0.2.8 releases it. So each constraint is first compiled in a separate
process (grammar_process.py), with a limit of processor time. If that succeeds, the engine gets the
constraint with the result of vLLM's validation, which is not repeated on the loop.

The process compiles a few constraints at a time (`at_once`), and tenants take turns. Requests
without a constraint, and those for any JSON object, do not use the process. The process starts for
the first constraint that needs it, which takes some seconds, and uses about 400 MB.
"""

import asyncio
import hashlib
import logging
import os
import pickle
import sys
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from itertools import count
from multiprocessing.reduction import ForkingPickler
from typing import Any

from contract.errors import RequestFailed
from worker.engine.parent_death import startup_code
from worker.engine.preparation import waiting
from worker.engine.vllm.grammar_process import CPU_S, LENGTH, WALL_S, as_message
from worker.engine.vllm.names import VLLMValidationError

log = logging.getLogger(__name__)

#: Most answers that are kept. Usually a file has one constraint, or one for each of its tools.
MOST_ANSWERS = 1024
#: The Python code that the process runs.
MAIN = "from worker.engine.vllm.grammar_process import main; main()"
#: Seconds in which the process has to load vLLM and the tokenizer; on two busy cores it takes 10 s.
START_S = 180.0
#: Most constraints that are compiled at a time, and the machine's processor cores for each of them;
#: the event loop and EngineCore need cores, too.
MOST_AT_ONCE, CORES_EACH = 4, 4
#: The error text for a constraint that takes too much processor time.
_SLOW = (
    f"the JSON schema, regex, choice or grammar takes more than {CPU_S:g} s to compile, which is "
    "the limit; give one with fewer properties, values and repetitions"
)

#: The answer of the process, as grammar_process.py describes it.
Answer = tuple[Any, ...]
#: The tenant of the current task's request.
TENANT: ContextVar[str] = ContextVar("tenant", default="")


class Grammars:
    """Checks the constraints of all requests of one engine."""

    def __init__(self, at_once: int | None = None) -> None:
        """Prepare; `at_once` is how many constraints are compiled at a time."""
        self._config: Any = None
        self._answers: OrderedDict[bytes, Answer] = OrderedDict()
        self._asking: dict[tuple[str, bytes], asyncio.Task[Answer]] = {}
        self._turns = FairTurns(at_once or default_at_once())
        self._compiler: CompilerProcess | None = None
        self._starting = asyncio.Lock()

    def guard(self, engine: Any) -> None:
        """Make an AsyncLLM call `check` before it takes a request with a constraint."""
        add, self._config = engine.add_request, engine.vllm_config

        async def add_request(
            request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
        ) -> Any:
            constraint = getattr(params, "structured_outputs", None)
            if constraint is not None:
                await self.check(params, constraint)
            return await add(request_id, prompt, params, *args, **kwargs)

        engine.add_request = add_request

    async def check(self, params: Any, constraint: Any) -> None:
        """Compile the constraint of SamplingParams; vLLM then does not validate it again.

        Raises:
            VLLMValidationError: the constraint cannot be compiled, or takes too long.
            RequestFailed: the process did not answer; the request may be retried.
        """
        if constraint.json_object and constraint.json is None:  # vLLM compiles it once for all
            return
        key = hashlib.sha256(pickle.dumps(constraint)).digest()
        answer = self._answers.get(key)
        if answer is None:
            with waiting():
                answer = await self._compile(key, constraint)
        if answer[0] == "valid":
            vars(constraint).update(answer[1])
            params._validate_structured_outputs = _validated
        elif answer[0] == "stalled":
            raise RequestFailed(f"a constraint was not compiled within {WALL_S:g} s")
        else:
            message = _SLOW if answer[0] == "slow" else answer[1]
            raise VLLMValidationError(message, parameter=None)

    async def _compile(self, key: bytes, constraint: Any) -> Answer:
        """Compile a constraint once for all of a tenant's requests that have it.

        Cancelling one request does not stop the compilation. Another tenant with the same
        constraint waits separately, for its own turn.
        """
        asker = TENANT.get(), key
        task = self._asking.get(asker)
        if task is None:
            task = asyncio.create_task(self._ask(*asker, constraint))
            self._asking[asker] = task
            task.add_done_callback(lambda done: self._keep_answer(asker, done))
        return await asyncio.shield(task)

    def _keep_answer(self, asker: tuple[str, bytes], task: "asyncio.Task[Answer]") -> None:
        self._asking.pop(asker, None)
        if task.cancelled() or task.exception() is not None or task.result()[0] == "stalled":
            return
        self._answers[asker[1]] = task.result()
        if len(self._answers) > MOST_ANSWERS:
            self._answers.popitem(last=False)

    async def _ask(self, tenant: str, key: bytes, constraint: Any) -> Answer:
        async with self._turns.taken(tenant):
            if answer := self._answers.get(key):
                return answer
            compiler = None
            try:
                async with self._starting:
                    compiler = self._compiler or await self._start()
                return await compiler.ask(constraint, WALL_S * 2)
            except (OSError, TimeoutError, EOFError) as error:
                if compiler is None or compiler is self._compiler:
                    self.end()
                error_type = type(error).__name__
                raise RequestFailed(
                    f"the process that compiles constraints does not answer ({error_type})"
                ) from None

    async def _start(self) -> "CompilerProcess":
        # "0" turns off vLLM's own limit for regexes, which counts real time.
        variables = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_REGEX_COMPILATION_TIMEOUT_S": "0"}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-W", "ignore", "-c", startup_code("end_with_parent") + MAIN,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL, env=os.environ | variables,
        )  # fmt: skip
        self._compiler = CompilerProcess(process)
        await self._compiler.configure(self._config)
        extra = {"action": "grammars_started"}
        log.info("a process compiles the constraints of requests: pid %s", process.pid, extra=extra)
        return self._compiler

    def end(self) -> None:
        """Kill the process, if there is one. The next constraint starts a new process."""
        compiler, self._compiler = self._compiler, None
        if compiler is not None:
            compiler.kill()


class CompilerProcess:
    """The process of grammar_process.py, and the constraints that it compiles now."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        """Begin to read the answers of a process that has started."""
        self.process = process
        self._numbers = count(1)
        self._asked: dict[int, asyncio.Future[Answer]] = {}
        self._reading = asyncio.create_task(self._read())

    async def configure(self, config: Any) -> None:
        """Send vLLM's configuration, and wait until all is loaded."""
        await self._exchange(0, bytes(ForkingPickler.dumps(config)), START_S)

    async def ask(self, constraint: Any, limit_s: float) -> Answer:
        """Compile a constraint.

        Raises:
            OSError, TimeoutError, EOFError: the process has ended, or does not answer.
        """
        number = next(self._numbers)
        return await self._exchange(number, pickle.dumps((number, constraint)), limit_s)

    async def _exchange(self, number: int, message: bytes, limit_s: float) -> Answer:
        if self._reading.done() or (writing := self.process.stdin) is None:
            raise EOFError
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            async with asyncio.timeout(limit_s):
                writing.write(as_message(message))
                await writing.drain()
                return await answer
        finally:
            del self._asked[number]

    async def _read(self) -> None:
        """Read answers until the process ends; then end what is still asked with EOFError."""
        try:
            while (reading := self.process.stdout) is not None:
                (length,) = LENGTH.unpack(await reading.readexactly(LENGTH.size))
                number, *answer = pickle.loads(await reading.readexactly(length))  # noqa: S301  trusted
                if (asked := self._asked.get(number)) and not asked.done():
                    asked.set_result(tuple(answer))
        except (OSError, asyncio.IncompleteReadError) as error:
            log.debug("the process that compiles constraints has ended: %r", error)
        finally:
            for asked in self._asked.values():
                if not asked.done():
                    asked.set_exception(EOFError())

    def kill(self) -> None:
        """Kill the process; what is asked ends with EOFError. Any thread may call this."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                self.process.kill()


def default_at_once() -> int:
    """Return how many constraints are compiled at a time on this machine."""
    return max(1, min(MOST_AT_ONCE, len(os.sched_getaffinity(0)) // CORES_EACH))


def _validated(*_: Any) -> None:
    """Replaces vLLM's validation of a constraint that the other process has validated."""


class FairTurns:
    """A semaphore for the tasks of one event loop, for which tenants take turns."""

    def __init__(self, places: int) -> None:
        self._free = places
        #: Waiting tasks by tenant. The first tenant is the next one to get a place.
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def taken(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a place, and hold it in this context."""
        if self._free:
            self._free -= 1
        else:
            await self._wait(tenant)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, tenant: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the task had just got a place
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            tenant, queue = self._waiting.popitem(last=False)
            turn = queue.popleft()
            if queue:
                self._waiting[tenant] = queue  # the tenant becomes the last one
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
