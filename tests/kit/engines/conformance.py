"""What the drain relies on, checked on a running engine: `python tests/kit/engines/conformance.py`.

The environment's WARMQ_ settings name the engine, as they do for a worker, and the catalogue makes
it: `conform` runs it so, in a process of its own, for vLLM changes much in a process, and some
engines are installed in environments of their own. Every check that has passed is a line of the
report. The engine lives twice, as it does where a worker rebuilds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from contract.errors import EngineDead, RequestRejected
from contract.openai.body import COMPLETION_URL
from demo.stack import ROOT, environment_of
from worker.engine import CanSleep, Capacity, Completion, Engine, EngineRequest
from worker.engine.catalogue import load_settings, make_engine

CHECKS = (
    "it starts and says what it can take",
    "a request is answered, and its tokens are counted",
    "a bad request costs only itself",
    "an abort takes effect within a step, and frees the slot",
    "an engine that hangs is seen, and can be killed",
    "a death says whether the request was inside",
    "a stopped engine leaves no process, no thread and no connection",
    "another one is built in the same process",
    "a death that nobody ordered is told to what is inside",
    "the other one leaves nothing, too",
)
#: Threads that a library starts once a process: the loop's executor, and gRPC's poller.
LASTING = ("asyncio_", "(_poll_wrapper)")
#: Nothing here takes so long on a machine that is busy with other things.
PATIENCE_S = 60.0
SHORT = {"prompt": "2 + 3 =", "max_tokens": 8, "temperature": 0}


async def until(look: Callable[[], Any], what: str) -> None:
    """Let the loop run until `look` is true."""
    deadline = time.monotonic() + PATIENCE_S
    while not look():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.01)


def descendants() -> set[int]:
    """Return the processes below this one, without multiprocessing's own."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            pid, _, rest = stat.read_text().partition(" (")
            parents.setdefault(int(rest.rpartition(") ")[2].split()[1]), []).append(int(pid))
    found, fresh = set[int](), {os.getpid()}
    while fresh := {child for pid in fresh for child in parents.get(pid, [])}:
        found |= fresh
    return {pid for pid in found if "resource_tracker" not in _command(pid)}


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def connections() -> set[str]:
    """Return this process's TCP connections."""
    inodes = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(str(link.readlink()).removeprefix("socket:[").removesuffix("]"))
    lines = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
    return {line for line in lines if line.split()[9] in inodes}


@dataclass
class Traces:
    """What an engine has added to this process and has to take away again."""

    threads: set[threading.Thread] = field(default_factory=lambda: set(threading.enumerate()))
    processes: set[int] = field(default_factory=descendants)
    connections: set[str] = field(default_factory=connections)

    def left(self) -> list[object]:
        """Return what has come since and is still there."""
        threads = [t.name for t in set(threading.enumerate()) - self.threads if t.is_alive()]
        return [
            *(name for name in threads if not any(word in name for word in LASTING)),
            *(_command(pid) or pid for pid in descendants() - self.processes),
            *connections() - self.connections,
        ]


class Life:
    """One engine from its start to its stop, used as the drain uses it.

    `server`: the process group that runs the engine's steps, where it is none of this process's.
    """

    def __init__(self, thread: ThreadPoolExecutor, server: int | None) -> None:
        self._thread, self._server = thread, server
        self._before = Traces()
        self._ids = iter(range(10**9))
        self.engine: Engine
        self.capacity: Capacity

    async def start(self) -> None:
        """Make, build and start it."""
        loop, settings = asyncio.get_running_loop(), load_settings()
        self.engine = await loop.run_in_executor(self._thread, make_engine, settings)
        await loop.run_in_executor(self._thread, self.engine.build)
        self.capacity = await self.engine.start()
        assert not self.engine.dead()

    async def ask(self, body: dict[str, Any], url: str = COMPLETION_URL) -> Completion:
        """Run one request to its end."""
        return await self.engine.generate(EngineRequest(url, body), f"c{next(self._ids)}")

    async def inside(self) -> tuple[str, asyncio.Task[Completion]]:
        """Return a long request that has begun to write."""
        request = EngineRequest(COMPLETION_URL, self.long)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:  # on a busy machine the end may come with the beginning
            request_id = f"long{next(self._ids)}"
            task = asyncio.create_task(self.engine.generate(request, request_id))
            await self._begun(request_id, task)
            if not task.done():
                return request_id, task
        raise AssertionError(task)

    async def _begun(self, request_id: str, task: asyncio.Task[Completion]) -> None:
        await until(lambda: task.done() or self.engine.text_so_far(request_id), "it writes")

    @property
    def long(self) -> dict[str, Any]:
        """A request that fills what the context leaves, or 3 s of the simulated engine."""
        room = min(self.capacity.max_model_len or 1024, 1024) - 64
        return SHORT | {"max_tokens": room, "ignore_eos": True, "user": "simulate:sleep=3"}

    def signal(self, number: int) -> None:
        """Send a signal to all that runs the engine's steps."""
        if self._server is not None:
            os.killpg(self._server, number)
        for pid in descendants() - self._before.processes if self._server is None else ():
            os.kill(pid, number)

    async def dies(self, task: asyncio.Task[Completion], inside: bool) -> None:
        """Wait until the engine's death ends a request and is seen."""
        await asyncio.wait([task], timeout=PATIENCE_S)
        error = task.exception() if task.done() else None
        assert isinstance(error, EngineDead), (task, error)
        assert error.inside is inside, error
        await until(self.engine.dead, "it is dead")

    async def stop(self) -> None:
        """Shut it down; nothing of it may be left."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self.engine.shutdown)
        deadline = time.monotonic() + 10
        while left := self._before.left():
            assert time.monotonic() < deadline, left
            await asyncio.sleep(0.05)


async def first_life(life: Life, inside: bool) -> AsyncIterator[None]:
    """Yield after each check."""
    await life.start()
    assert life.capacity.max_num_seqs >= 1 and life.capacity.max_model_len >= 0
    assert life.capacity.model
    assert json.dumps(life.capacity.details)
    yield
    answer = await life.ask(SHORT)
    body = json.loads(answer.body)
    usage = body["usage"]
    assert body["choices"][0]["text"] and body["choices"][0]["finish_reason"] in ("stop", "length")
    assert usage["prompt_tokens"] == answer.prompt_tokens > 0
    assert usage["completion_tokens"] == answer.completion_tokens > 0
    if isinstance(engine := life.engine, CanSleep):
        fixed = await engine.answer_fixed_question()
        assert fixed and fixed == await engine.answer_fixed_question()
    yield
    began = time.monotonic()
    _, beside = await life.inside()
    try:
        await life.ask(SHORT, "/v1/nothing")
        raise AssertionError("a url that nobody serves was served")
    except RequestRejected as error:
        assert str(error)
    assert (await beside).completion_tokens > 0 and not life.engine.dead()
    took_s = time.monotonic() - began
    yield
    slots = range(life.capacity.max_num_seqs)
    running = await asyncio.gather(*(life.inside() for _ in slots))
    running = [(request_id, task) for request_id, task in running if not task.done()]
    began = time.monotonic()
    for _, task in running:
        task.cancel()
    ends = await asyncio.gather(*(task for _, task in running), return_exceptions=True)
    assert ends and all(isinstance(end, asyncio.CancelledError) for end in ends), ends
    await life.ask(SHORT)
    assert time.monotonic() - began < took_s * 0.75, "what was aborted ran on"
    assert not any(life.engine.text_so_far(request_id) for request_id, _ in running)
    yield
    _, task = await life.inside()
    life.signal(signal.SIGSTOP)
    await until(lambda: time.monotonic() - life.engine.last_progress() > 1, "no step is made")
    assert not task.done()
    life.engine.kill()
    await life.dies(task, inside)
    yield
    try:
        await life.ask(SHORT)
        raise AssertionError("a dead engine answered")
    except EngineDead as error:
        assert not error.inside
    yield
    life.signal(signal.SIGCONT)
    await life.stop()
    yield


async def second_life(life: Life, inside: bool) -> AsyncIterator[None]:
    """Yield after each check."""
    await life.start()
    await life.ask(SHORT)
    yield
    _, task = await life.inside()
    life.signal(signal.SIGKILL)
    await life.dies(task, inside)
    yield
    await life.stop()
    yield


async def main(report: Path, server: int | None, inside: tuple[bool, bool]) -> None:
    """Write a line for every check that passed; the first that does not ends the process."""
    checks = iter(CHECKS)
    with ThreadPoolExecutor(1) as thread, report.open("w", buffering=1) as lines:
        thread.submit(int).result()
        for live, counted in zip((first_life, second_life), inside, strict=True):
            async for _ in live(Life(thread, server), counted):
                lines.write(next(checks) + "\n")


def conform(
    folder: Path, python: Path | str = sys.executable, server: int | None = None,
    inside: tuple[bool, bool] = (True, True), env: dict[str, str] | None = None, **settings: object,
) -> None:  # fmt: skip
    """Run every check on the engine of these settings, in a process of its own.

    `inside`: whether a request that ran counts a death when the engine was killed because it
    hung, and when it died of itself.

    Raises:
        AssertionError: with the checks that passed and the end of the log.
    """
    clean = environment_of(settings)
    report, log = folder / "report", folder / "conformance.log"
    with log.open("wb") as output:
        done = subprocess.run(
            [python, __file__, report, json.dumps([server, inside])],
            cwd=ROOT, env=clean | (env or {}), stdout=output, stderr=output, timeout=240,
            check=False,
        )  # fmt: skip
    passed = report.read_text().splitlines() if report.exists() else []
    assert (done.returncode, passed) == (0, list(CHECKS)), log.read_text(errors="replace")[-4000:]


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), *json.loads(sys.argv[2])))
