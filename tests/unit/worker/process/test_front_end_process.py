"""The worker's end of a front end: questions, answers and reports over one socket."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from kit.drain.draining import soon

from worker.engine.simulated.engine import SimulatedEngine
from worker.process import front_ends
from worker.process.front_ends import FrontEnd, FrontEnds, _abort_client, opened


class OtherEnd:
    """What the process does: reads lines, writes lines."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer

    async def heard(self) -> dict[str, Any]:
        line = await asyncio.wait_for(self._reader.readline(), 10)
        return orjson.loads(line)  # type: ignore[no-any-return]

    def says(self, **message: Any) -> None:
        self.writer.write(orjson.dumps(message) + b"\n")


@asynccontextmanager
async def connected(
    process: asyncio.subprocess.Process | None = None,
) -> AsyncIterator[tuple[FrontEnd, OtherEnd, asyncio.Task[None]]]:
    ours, its = socket.socketpair()
    one = FrontEnd(1, process)  # type: ignore[arg-type]
    reader, one._writer = await opened(ours)
    other = OtherEnd(*await asyncio.open_connection(sock=its))
    listening = asyncio.create_task(one._listen(reader))
    try:
        yield one, other, listening
    finally:
        other.writer.close()
        await listening
        one._writer.close()


def test_questions_that_wait_at_the_same_time_get_each_its_own_answer() -> None:
    async def ask_both() -> None:
        async with connected() as (one, other, _):
            pausing = asyncio.create_task(one.ask("pause", None))
            assert await other.heard() == {"do": "pause"}
            listing = asyncio.create_task(one.ask("active", 10))
            assert await other.heard() == {"do": "active"}
            other.says(to="active", answer=[{"id": "r1"}])
            assert await listing == [{"id": "r1"}]
            assert not pausing.done()
            other.says(to="pause", answer=None)
            assert await asyncio.wait_for(pausing, 10) is None

    asyncio.run(ask_both())


def test_two_who_ask_the_same_share_one_answer() -> None:
    async def ask_twice() -> None:
        async with connected() as (one, other, _):
            asked = [asyncio.create_task(one.ask("active", 10)) for _ in range(2)]
            await other.heard()
            other.says(to="active", answer=["r1"])
            assert await asyncio.gather(*asked) == [["r1"], ["r1"]]

    asyncio.run(ask_twice())


def test_whoever_asks_one_that_has_ended_is_not_kept_waiting() -> None:
    async def ask_the_dead() -> None:
        async with connected() as (one, other, listening):
            waiting = asyncio.create_task(one.ask("pause", None))
            await other.heard()
            other.says(report={"in_flight": 3})
            other.writer.close()
            await listening
            assert await asyncio.wait_for(waiting, 10) is None
            assert await asyncio.wait_for(one.ask("pause", None), 10) is None
            assert one.report == {"in_flight": 3}

    asyncio.run(ask_the_dead())


def test_an_engine_that_cannot_abort_does_not_take_the_worker_along() -> None:
    class Stubborn(SimulatedEngine):
        async def abort_client(self, client: dict[str, Any]) -> int:
            raise RuntimeError("no such call")

    assert asyncio.run(_abort_client(Stubborn(1, 0.0), {})).endswith(": no such call")
    assert asyncio.run(_abort_client(SimulatedEngine(1, 0.0), {})).startswith(
        "0 requests were aborted"
    )


def test_an_answer_may_be_longer_than_asyncio_lets_a_line_be() -> None:
    requests = [{"id": f"r{n}", "custom_id": "c" * 200} for n in range(1000)]

    async def ask() -> None:
        async with connected() as (one, other, listening):
            asked = asyncio.create_task(one.ask("active", 10))
            await other.heard()
            other.says(to="active", answer=requests)
            assert await asked == requests
            assert not listening.done()

    asyncio.run(ask())


@asynccontextmanager
async def stopped() -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a process that SIGSTOP has stopped."""
    process = await asyncio.create_subprocess_exec("sleep", "600")
    process.send_signal(signal.SIGSTOP)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_one_that_hangs_is_killed_where_others_wait_for_its_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(front_ends, "PAUSE_S", 0.05)
    async with stopped() as process, connected(process) as (one, other, _):
        other.says(report={"in_flight": 3})
        await soon(lambda: one.report)
        fronts = FrontEnds("w1", 2)
        fronts._running[1] = one
        await asyncio.wait_for(fronts.pause(), 20)
        assert await asyncio.wait_for(process.wait(), 20) == -signal.SIGKILL


async def test_one_that_still_starts_is_not_waited_for_nor_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(front_ends, "PAUSE_S", 0.05)
    async with stopped() as process, connected(process) as (one, other, _):
        await asyncio.wait_for(one.pause(), 20)
        assert await other.heard() == {"do": "pause"}
        assert process.returncode is None


async def test_one_that_works_is_waited_for_as_long_as_it_tells_of_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with stopped() as process, connected(process) as (one, other, _):
        asked = 0

        async def ask(what: str, within_s: float | None) -> None:
            nonlocal asked
            asked += 1
            one._reports += asked < 5  # it goes on telling of itself, then it is idle
            one._answers = {} if asked == 5 else {what: asyncio.Future()}

        monkeypatch.setattr(one, "ask", ask)
        other.says(report={"in_flight": 3})
        await soon(lambda: one.report)
        await asyncio.wait_for(one.pause(), 20)
        assert asked == 5
        assert process.returncode is None
        one._answers = {}


@pytest.mark.parametrize("started", [True, False])
async def test_one_that_is_suspended_is_killed_also_before_its_first_report(
    monkeypatch: pytest.MonkeyPatch, started: bool
) -> None:
    monkeypatch.setattr(front_ends, "CHECK_S", 0.01)
    monkeypatch.setattr(front_ends, "SILENT_S", 0.05)
    async with stopped() as process, connected(process) as (one, other, _):
        if started:
            other.says(report={"in_flight": 3})
        await asyncio.wait_for(one.wait_for_end(), 20)
        assert process.returncode == -signal.SIGKILL
