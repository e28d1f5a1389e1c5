"""The fleet of remote servers by itself, without a network: who gets a request, and when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import pytest

from contract.errors import EngineDead
from contract.settings import SettingsError
from worker.engine.remote import servers as servers_module
from worker.engine.remote.servers import MISSES, Health, Interrupted, Report, Server, Servers

WELL, ILL = Report(Health.WELL), Report(Health.ILL, "went away")
SILENT, UNUSABLE = Report(Health.SILENT, "is late"), Report(Health.UNUSABLE, "refuses the key")


class FakeServer(Server):
    """Its health is what the test set."""

    def __init__(self, name: str, limit: int | None = None, report: Report = WELL) -> None:
        super().__init__(name, limit)
        self.report = report
        self.asked = 0
        self.closed = False
        self.unsent_times = 0

    def note_unsent(self) -> None:
        """Count it."""
        self.unsent_times += 1

    async def ask(self) -> Report:
        """Return it."""
        self.asked += 1
        return self.report

    async def close(self) -> None:
        """Note it."""
        self.closed = True


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask for health a hundred times as often."""
    monkeypatch.setattr(servers_module, "ASK_EVERY_S", 0.01)


@pytest.fixture
async def two() -> AsyncIterator[Servers[FakeServer]]:
    """Return a fleet of two servers that are well and have no limit."""
    fleet: Servers[FakeServer] = Servers(stall_s=60, wait_s=None)
    await fleet.start([FakeServer("a"), FakeServer("b")])
    yield fleet
    await fleet.close()


async def until(look: Callable[[], object]) -> None:
    """Wait until something is so."""
    async with asyncio.timeout(10):
        while not look():  # noqa: ASYNC110 - what is looked at has no event
            await asyncio.sleep(0.005)


async def test_each_request_goes_where_the_fewest_are_in_flight(two: Servers[FakeServer]) -> None:
    a, b = two.servers
    taken = [await two.take() for _ in range(4)]
    assert (a.in_flight, b.in_flight) == (2, 2)
    for server in taken[:2]:
        two.give(server)
    two.give(b)
    assert await two.take() is b


async def test_servers_with_limits_are_filled_evenly_and_the_rest_waits_in_turn() -> None:
    fleet: Servers[FakeServer] = Servers(60, None)
    small, large = FakeServer("a", 1), FakeServer("b", 3)
    await fleet.start([small, large])
    assert [await fleet.take() for _ in range(4)].count(large) == 3
    first, second = (asyncio.create_task(fleet.take()) for _ in range(2))
    await asyncio.sleep(0)
    fleet.give(large)
    assert await first is large
    assert not second.done()
    second.cancel()
    with suppress(asyncio.CancelledError):
        await second
    fleet.give(large)
    assert large.in_flight == 2, "who no longer waits holds no place"
    await fleet.close()


async def test_who_is_cancelled_with_a_server_in_hand_sends_nothing() -> None:
    fleet: Servers[FakeServer] = Servers(60, None)
    only = FakeServer("a", 1)
    await fleet.start([only])
    held = await fleet.take()
    waits = asyncio.create_task(fleet.take())
    await asyncio.sleep(0)
    fleet.give(held)  # and hands it to the next
    waits.cancel()
    with suppress(asyncio.CancelledError):
        await waits
    assert (only.in_flight, only.unsent_times) == (0, 1)
    await fleet.close()


async def test_a_server_to_avoid_is_taken_only_if_there_is_no_other(
    two: Servers[FakeServer],
) -> None:
    a, b = two.servers
    b.in_flight = 5
    assert await two.take(frozenset([a])) is b
    two.down(b, "went")
    assert await two.take(frozenset([a])) is a


async def test_a_server_whose_health_is_bad_gets_nothing_until_it_is_good(
    two: Servers[FakeServer],
) -> None:
    a, b = two.servers
    a.report = ILL
    await until(lambda: not a.up)
    assert {await two.take() for _ in range(4)} == {b}
    assert two.shown["a"] == "went away"
    assert not two.dead
    a.report = WELL
    await until(lambda: a.up)
    assert await two.take() is a
    await until(lambda: two.shown["a"] == {"in_flight": 1})


async def test_a_busy_server_may_answer_late_but_not_every_time() -> None:
    fleet: Servers[FakeServer] = Servers(60, None)
    fleet.servers = [server] = [FakeServer("a")]
    await fleet.ask(server)
    server.report = SILENT
    for _ in range(MISSES - 1):
        await fleet.ask(server)
        assert server.up
    await fleet.ask(server)
    assert (server.up, server.why) == (False, "is late")


async def test_those_who_ask_for_health_at_once_share_one_question() -> None:
    fleet: Servers[FakeServer] = Servers(60, None)
    server = FakeServer("a")
    await asyncio.gather(*(fleet.ask(server) for _ in range(20)))
    assert server.asked == 1


async def test_a_server_that_hangs_loses_its_requests_and_rests_though_it_looks_healthy() -> None:
    fleet: Servers[FakeServer] = Servers(stall_s=0.05, wait_s=None)
    hung, other = FakeServer("a"), FakeServer("b")
    await fleet.start([hung, other])
    assert await fleet.take() is hung
    with pytest.raises(Interrupted, match=r"no step for 0\.05 s"):
        async with hung.running():
            await asyncio.Event().wait()
    fleet.give(hung)
    assert (hung.up, hung.why) == (False, "hangs")
    fleet.down(hung, "was left by a request")  # which does not end its rest
    assert await fleet.ask(hung) is Health.WELL
    assert not hung.up
    assert await fleet.take() is other
    hung.rest_until = 0.0
    await until(lambda: hung.up)
    await fleet.close()


async def test_a_server_whose_judge_decides_is_not_away_when_what_runs_in_it_stalls() -> None:
    fleet: Servers[FakeServer] = Servers(stall_s=0.05, wait_s=None)
    server = FakeServer("a")
    server.down_if_stalled = False
    await fleet.start([server])
    with pytest.raises(Interrupted, match=r"no step for 0\.05 s"):
        async with server.running():
            await asyncio.Event().wait()
    assert server.up
    await fleet.close()


async def test_a_server_is_asked_no_sooner_than_it_bears() -> None:
    fleet: Servers[FakeServer] = Servers(60, None)
    server = FakeServer("a")
    server.check_from = time.monotonic() + 600
    with suppress(TimeoutError):
        async with asyncio.timeout(0.1):
            await fleet.start([server])
    assert server.asked == 0
    server.check_from = 0.0
    await fleet.start([server])
    await until(lambda: server.asked > 3)
    await fleet.close()


async def test_what_makes_steps_does_not_hang() -> None:
    server = FakeServer("a")
    async with server.running():
        await asyncio.sleep(0.02)
        assert server.stalled(0.01)
        server.progress()
        assert not server.stalled(0.01)
    await asyncio.sleep(0.02)
    assert not server.stalled(0.01), "nothing runs in it"


async def test_a_time_limit_of_the_protocols_library_is_not_an_interruption() -> None:
    with pytest.raises(TimeoutError):
        async with FakeServer("a").running():
            raise TimeoutError


async def test_with_no_server_left_nobody_is_blamed_and_those_who_wait_are_told(
    two: Servers[FakeServer],
) -> None:
    a, b = two.servers
    a.limit = b.limit = 1
    await two.take()
    await two.take()
    waiting = asyncio.create_task(two.take())
    await asyncio.sleep(0)
    for server in two.servers:
        server.report = ILL
        two.down(server, "was killed")
    with pytest.raises(EngineDead, match="no server is left: a: was killed; b: ") as raised:
        await waiting
    assert raised.value.inside is False
    with pytest.raises(EngineDead, match="no server is left") as raised:
        await two.take()
    assert raised.value.inside is False
    assert two.dead


async def test_killing_a_fleet_interrupts_what_runs_in_it(two: Servers[FakeServer]) -> None:
    server = await two.take()

    async def run() -> None:
        async with server.running():
            await asyncio.Event().wait()

    running = asyncio.create_task(run())
    await asyncio.sleep(0)
    two.kill()
    with pytest.raises(Interrupted):
        await running
    assert two.dead


async def test_progress_is_that_of_the_latest_busy_server(two: Servers[FakeServer]) -> None:
    a, b = two.servers
    a.progress_at, b.progress_at = 5.0, 9.0
    assert two.last_progress() > 9.0, "nothing runs: nothing can hang"
    a.in_flight = 1
    assert two.last_progress() == 5.0
    b.in_flight = 1
    assert two.last_progress() == 9.0


async def test_a_start_waits_until_one_server_is_well() -> None:
    fleet: Servers[FakeServer] = Servers(60, wait_s=None)
    servers = [FakeServer("a", report=ILL), FakeServer("b", report=UNUSABLE)]
    starting = asyncio.create_task(fleet.start(servers))
    await until(lambda: servers[0].asked > 3)
    assert not starting.done(), "one server cannot be used, and the other may come back"
    servers[0].report = WELL
    assert await starting is servers[0]
    await fleet.close()
    assert all(server.closed for server in servers)
    assert fleet.dead


async def test_a_start_that_waited_long_enough_says_why_and_blames_nobody() -> None:
    fleet: Servers[FakeServer] = Servers(60, wait_s=0.03)
    server = FakeServer("a", report=ILL)
    with pytest.raises(EngineDead, match=r"WARMQ_REMOTE_WAIT_S.*a: went away") as raised:
        await fleet.start([server])
    assert raised.value.inside is False
    assert server.asked > 1


async def test_a_start_does_not_wait_for_what_only_a_setting_can_mend() -> None:
    fleet: Servers[FakeServer] = Servers(60, wait_s=None)
    with pytest.raises(SettingsError, match="no server can be used: a: refuses the key"):
        await fleet.start([FakeServer("a", report=UNUSABLE), FakeServer("b", report=UNUSABLE)])


async def test_a_fleet_whose_watch_failed_is_dead(two: Servers[FakeServer]) -> None:
    async def fail() -> None:
        raise ValueError("a bug")

    two.servers[0].measure = fail  # type: ignore[method-assign]
    await until(lambda: two.dead)
    with pytest.raises(EngineDead, match="no server is left: their health is not watched"):
        await two.take()
