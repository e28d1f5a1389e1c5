"""An engine without a model, which simulates slots and latencies for tests and benchmarks.

Every answer consists of the word `simulated` and a digest of its request's prompt, so that a test
can match answer and request. A request chooses its behavior with the field `user` of its body:

- `simulate:die` kills the engine, `simulate:die=SECONDS` after this number of seconds;
- `simulate:kill-worker` kills the whole worker process;
- `simulate:spin` blocks the event loop;
- `simulate:hold-lock` also holds the Python interpreter's lock (GIL);
- `simulate:fail` fails this attempt, `simulate:fail=SECONDS` after this number of seconds;
- `simulate:sleep=SECONDS` takes this number of seconds.

A model with the path `simulate:fail` cannot be loaded.

With a child process (StandIn), the engine dies and hangs in the same ways as vLLM's EngineCore. The
start and end of each request can be written to a log file, so that tests need not trust warmq's own
counters.
"""

import asyncio
import contextlib
import hashlib
import math
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import orjson

from contract.errors import EngineDead, RequestFailed, RequestRejected
from contract.openai.body import CHAT_URL, LIMITS, MESSAGES_URL, RESPONSES_URL
from worker.engine import Capacity, Completion, EngineRequest
from worker.engine.shutdown import children_shielded
from worker.engine.simulated import SimulatedSettings
from worker.engine.simulated.device import DeviceShare
from worker.engine.simulated.slots import Slots

#: Sigma of the lognormal latency, whose mean is `latency_s`.
SIGMA = 0.5
#: The path of a model that cannot be loaded.
FAILS = "simulate:fail"
#: The text of a running request, as the list of its choices.
FIRST_WORD = ("simulated ",)


def digest(body: dict[str, Any]) -> str:
    """Return the digest that the answer to `body` contains."""
    prompt = body.get("messages") or body.get("prompt") or body.get("input")
    return hashlib.sha256(orjson.dumps(prompt)).hexdigest()[:16]


@dataclass(eq=False)
class SimulatedEngine:
    """Runs `slots` requests at once, each for a lognormal time with the mean `latency_s`.

    Waiting requests start by priority.
    Each of `front_ends` processes has its part of the slots. With `step_s`, requests end at
    multiples of this number of seconds, all of one step at the same time, as with vLLM.
    """

    grace_s: ClassVar[float] = 0.0

    slots: int
    latency_s: float
    seed: int = 7
    step_s: float = 0.0
    log: Path | None = None
    build_s: float = 0.0
    end_s: float = 0.0
    process: bool = False
    behavior: str = ""
    sleep_as: str = ""
    front_ends: int = 1
    model: str | None = None
    #: The name of the loaded model, which each answer contains; '' for none.
    named: str = ""
    running: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._ends: dict[int, list[asyncio.Future[bool]]] = {}
        self._random = random.Random(self.seed)  # noqa: S311 - random latencies, not a secret
        self._process: StandIn | None = None
        self._free = Slots(-(-self.slots // self.front_ends))
        self._dead = False
        self._sleeping: set[asyncio.Future[bool]] = set()
        self._texts: dict[str, Sequence[str]] = {}
        self._wrote: Callable[[], None] = lambda: None
        self._device = DeviceShare(self.sleep_as)

    def build(self) -> None:
        self._process = StandIn() if self.process and self.model != FAILS else None
        time.sleep(self.build_s)
        if self.model == FAILS:
            raise RuntimeError("simulated failure to load the model")
        self._device.load()

    async def start(self) -> Capacity:
        if self._process is not None:
            self._process.watch(self._die)
        details = {"engine": "simulated"}
        identity = f"simulated {self.model} {self.named}"
        return Capacity(self.slots, 4096, "simulated", details=details, identity=lambda: identity)

    async def generate(self, request: EngineRequest, request_id: str) -> Completion:
        if request.url not in LIMITS:
            raise RequestRejected(
                f"field url: the simulated engine has no answer for {request.url}",
                code="unknown_url",
                field="url",
            )
        await self._free.take(request.priority)
        try:
            if self._dead:
                raise EngineDead("the simulated engine is dead", inside=False)
            self._device.refuse_asleep()
            self.running += 1
            self._note("start", request_id)
            self._texts[request_id] = FIRST_WORD
            self._wrote()
            try:
                await self._work(request.body)
                self._note("end", request_id)
            finally:
                self.running -= 1
                del self._texts[request_id]
        finally:
            self._free.give()
        return _answer(request, request_id, f"{self.named} " if self.named else "")

    def text_so_far(self, request_id: str) -> Sequence[str]:
        """Return the first word of a running request; the digest comes with the answer."""
        return self._texts.get(request_id, ())

    def on_text(self, call: Callable[[], None]) -> None:
        self._wrote = call  # called when a request begins and has its first word

    async def _work(self, body: dict[str, Any]) -> None:
        behavior, _, seconds = str(body.get("user") or self.behavior).partition("=")
        if behavior == "simulate:fail":
            await asyncio.sleep(float(seconds or 0))
            raise RequestFailed("simulated failure of this attempt")
        if behavior == "simulate:die":
            await asyncio.sleep(float(seconds or 0))
            self._die()
            raise EngineDead("the simulated engine died")
        if behavior == "simulate:spin":
            while True:
                pass
        if behavior == "simulate:hold-lock":
            re.match(r"(a+)+$", "a" * 64 + "b")  # takes for ever, and holds the GIL
        if behavior == "simulate:kill-worker":
            os.kill(os.getpid(), signal.SIGKILL)
        delay = float(seconds) if behavior == "simulate:sleep" and seconds else self._latency()
        if delay == 0:
            await asyncio.sleep(0)
            return
        died = await self._dies_within(delay)
        if self._process is not None and not self._dead:
            await self._process.step()
        if died or (self._process is not None and self._dead):
            raise EngineDead("the simulated engine died")

    async def _dies_within(self, delay: float) -> bool:
        """Sleep for `delay` seconds. Returns whether the engine died meanwhile.

        Futures are used, because a task for each request would take more time than the code that
        the benchmarks measure.
        """
        loop = asyncio.get_running_loop()
        over: asyncio.Future[bool] = loop.create_future()
        timer = None
        if not self.step_s:
            timer = loop.call_later(delay, _settle, (over,))
        else:
            step = round((loop.time() + delay) / self.step_s)
            if step not in self._ends:
                self._ends[step] = []
                loop.call_at(step * self.step_s, lambda: _settle(self._ends.pop(step)))
            self._ends[step].append(over)
        self._sleeping.add(over)
        try:
            return await over
        finally:
            self._sleeping.discard(over)
            if timer is not None:
                timer.cancel()

    def _die(self) -> None:
        self._dead = True
        for sleeping in self._sleeping:
            if not sleeping.done():
                sleeping.set_result(True)

    def _latency(self) -> float:
        if self.latency_s == 0:
            return 0.0
        return self._random.lognormvariate(math.log(self.latency_s) - SIGMA**2 / 2, SIGMA)

    def _note(self, what: str, request_id: str) -> None:
        """Append `start|end <request id> <pid>` in one write: workers may share the log file."""
        if self.log is not None:
            line = f"{what} {request_id} {os.getpid()}\n".encode()
            file = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(file, line)
            os.close(file)

    def new_client(self) -> dict[str, Any]:
        return {}  # each attached process simulates its own engine

    async def abort_client(self, _: dict[str, Any]) -> int:
        return 0  # the requests of a killed process ended with it

    async def sleep(self) -> None:
        await self._device.sleep()

    async def wake_up(self) -> None:
        if self._dead:
            raise EngineDead("the simulated engine is dead", inside=False)
        await self._device.wake_up()

    def device_used(self) -> int:
        return self._device.used()

    async def answer_fixed_question(self) -> str:
        return self._device.answer

    def dead(self) -> bool:
        return self._dead

    def last_progress(self) -> float:
        # Without a child process the engine cannot hang.
        return self._process.stepped_at if self._process is not None else time.monotonic()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
        else:
            self._die()

    def shutdown(self) -> None:
        self._device.free()
        time.sleep(self.end_s)
        if self._process is not None:
            self._process.shutdown()


def _settle(ends: Sequence[asyncio.Future[bool]]) -> None:
    for over in ends:
        if not over.done():
            over.set_result(False)


def _answer(request: EngineRequest, request_id: str, loaded: str = "") -> Completion:
    text = FIRST_WORD[0] + loaded + digest(request.body)
    model = request.body.get("model") or "simulated"
    if request.url == MESSAGES_URL:
        return Completion(orjson.dumps(_message(request_id, model, text)), 1, 1)
    if request.url == RESPONSES_URL:
        return Completion(orjson.dumps(_response(request_id, model, text)), 1, 1)
    chat = request.url == CHAT_URL
    message = {"role": "assistant", "content": text, "refusal": None}
    content = {"message": message} if chat else {"text": text}
    body = {
        "id": request_id,
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, **content, "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }
    return Completion(orjson.dumps(body), 1, 1)


def _message(request_id: str, model: str, text: str) -> dict[str, Any]:
    return {
        "id": request_id, "type": "message", "role": "assistant", "model": model,
        "content": [{"type": "text", "text": text}],
        "stop_reason": "end_turn", "stop_sequence": None,
        "usage": {"input_tokens": 1, "output_tokens": 1},
    }  # fmt: skip


def _response(request_id: str, model: str, text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    message = {"type": "message", "id": f"msg_{request_id}", "role": "assistant",
               "status": "completed", "content": [part]}  # fmt: skip
    tokens = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
    details = {"input_tokens_details": {"cached_tokens": 0},
               "output_tokens_details": {"reasoning_tokens": 0}}  # fmt: skip
    return {
        "id": f"resp_{request_id}", "object": "response", "model": model, "status": "completed",
        "created_at": int(time.time()), "output": [message], "usage": tokens | details,
        "parallel_tool_calls": True, "tool_choice": "none", "tools": [],
    }  # fmt: skip


def from_settings(settings: SimulatedSettings, _: object = None) -> SimulatedEngine:
    """Return an engine that the caller has to build. An attached process gets its own engine."""
    tests = dict(settings.simulated_tests)
    named = tests.pop("names_model")
    return SimulatedEngine(
        settings.simulated_slots,
        front_ends=settings.front_ends or 1,
        model=settings.model,
        sleep_as=tests.pop("sleep"),
        named=settings.served_model_name or "" if named else "",
        **tests,
    )


#: Seconds between two steps of the child process.
STEP_S = 0.05
#: Seconds that a killed child process may take to end.
KILLED_S = 5.0


class StandIn:
    """A child process that stands in for vLLM's EngineCore: `cat`, with one byte for each step.

    If it is killed, all requests in flight fail. If it is stopped (SIGSTOP), it makes no step. It
    starts in milliseconds; EngineCore takes half a minute. The engine's thread starts it, and the
    drain's loop watches it.
    """

    def __init__(self) -> None:
        # Unbuffered: one byte is one step. `cat` ends when this process closes its end of the pipe.
        with children_shielded():
            self._process = subprocess.Popen(
                ["cat", "-u"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
            )
        assert self._process.stdin is not None and self._process.stdout is not None  # noqa: S101
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self.stepped_at = time.monotonic()
        self._waiting: set[asyncio.Future[None]] = set()

    def watch(self, died: Callable[[], None]) -> None:
        """Begin to make steps. `died` is called once, when the process has ended."""
        self._loop = asyncio.get_running_loop()
        self._died, self.stepped_at = died, time.monotonic()
        os.set_blocking(self._stdin.fileno(), False)
        self._loop.add_reader(self._stdout.fileno(), self._stepped)
        self._ask()

    async def step(self) -> None:
        """Wait for the next step, or the process's end. If the process hangs, this never ends."""
        waiter = self._loop.create_future()
        self._waiting.add(waiter)
        try:
            await waiter
        finally:
            self._waiting.discard(waiter)

    def _ask(self) -> None:
        with contextlib.suppress(BrokenPipeError, BlockingIOError):
            os.write(self._stdin.fileno(), b".")
        self._timer = self._loop.call_later(STEP_S, self._ask)

    def _stepped(self) -> None:
        if not os.read(self._stdout.fileno(), 4096):
            self._timer.cancel()
            self._loop.remove_reader(self._stdout.fileno())
            self._died()
        self.stepped_at = time.monotonic()
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)

    def kill(self) -> None:
        self._process.kill()

    def shutdown(self) -> None:
        """Kill the process and wait for its end. Called in the engine's own thread.

        Raises:
            subprocess.TimeoutExpired: the process did not end.
        """
        self._process.kill()
        self._process.wait(KILLED_S)
        if hasattr(self, "_loop"):
            self._loop.call_soon_threadsafe(self._close_pipes)

    def _close_pipes(self) -> None:
        self._timer.cancel()
        self._loop.remove_reader(self._stdout.fileno())
        self._stdin.close()
        self._stdout.close()
