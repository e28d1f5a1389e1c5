"""Engines that sleep between stays: what is checked, and what happens if a check fails."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from contract.errors import EngineDead, RequestFailed
from contract.openai.body import COMPLETION_URL
from worker.drain.events import Events
from worker.drain.lifecycle import Lifecycle
from worker.drain.supervisor import Supervisor
from worker.engine import EngineRequest
from worker.engine.simulated import ASLEEP_BYTES
from worker.engine.simulated.engine import SimulatedEngine
from worker.models import asleep
from worker.models.asleep import Asleep

MODEL = "m"


class Stays:
    """The stays of one model: each has a supervisor of its own, as each drain has."""

    def __init__(self, sleep_as: str, **engine: Any) -> None:
        self.keeper = Asleep(MODEL, ASLEEP_BYTES)
        self.made: list[SimulatedEngine] = []
        self._options = {"sleep_as": sleep_as, "latency_s": 0.0, **engine}

    def _make(self) -> SimulatedEngine:
        self.made.append(SimulatedEngine(4, **self._options))
        return self.made[-1]

    async def stay(self, *, swapping: bool = True) -> SimulatedEngine:
        """Start, run one request, and end as before a swap; return the engine."""
        lifecycle = Lifecycle(1.0, lambda _: None)
        supervisor = Supervisor(self._make, 1, 1, lifecycle, Events())
        supervisor.keeper = self.keeper
        await supervisor.start()
        engine = supervisor.engine
        await engine.generate(EngineRequest(COMPLETION_URL, {"prompt": "p"}), "r1")
        lifecycle.swapping = swapping
        await supervisor.stop()
        assert isinstance(engine, SimulatedEngine)
        return engine


def failed(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if vars(r).get("action") == "sleep_failed"]


async def test_an_engine_that_sleeps_well_is_made_once(caplog: pytest.LogCaptureFixture) -> None:
    on = Stays("well", process=True)
    with caplog.at_level(logging.INFO):
        engines = [await on.stay() for _ in range(3)]
    assert len(on.made) == 1 and len(set(map(id, engines))) == 1
    assert engines[0].device_used() == ASLEEP_BYTES
    with pytest.raises(RequestFailed, match="sleeps"):
        await engines[0].generate(EngineRequest(COMPLETION_URL, {"prompt": "p"}), "r1")
    assert not failed(caplog)
    assert "9.0 GiB of the device are free again" in caplog.text
    await on.keeper.end()
    assert engines[0].device_used() == 0


async def test_an_engine_is_shut_down_at_the_end_of_the_worker() -> None:
    on = Stays("well")
    await on.stay()
    engine = await on.stay(swapping=False)
    assert on.keeper.take() is None and engine.device_used() == 0


@pytest.mark.parametrize(("sleep_as", "made", "words"), [
    ("wrong", 4, "fixed question"),
    ("leaks", 5, "it has 10.0 GiB of the device, at most 1.0"),
    ("fails", 5, "cannot sleep"),
    ("hangs", 5, "not asleep after"),
    ("wake-hangs", 4, "not awake after"),
])  # fmt: skip
async def test_after_a_wrong_sleep_each_stay_starts_an_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    sleep_as: str, made: int, words: str,
) -> None:  # fmt: skip
    for limit in ("SLEEP_S", "WAKE_S"):
        monkeypatch.setattr(asleep, limit, 0.3)
    on = Stays(sleep_as)
    for _ in range(made):
        await on.stay()
    assert not on.keeper.works
    assert len(on.made) == made
    assert len(failed(caplog)) == 1
    assert words in failed(caplog)[0] and MODEL in failed(caplog)[0]
    assert on.made[-1].device_used() == 0  # all engines of this process together
    assert on.made[0].dead() == ("hangs" in sleep_as)  # such an engine is killed


async def test_a_start_does_not_show_how_long_a_wake_takes() -> None:
    on = Stays("well")
    await on.stay()
    assert on.keeper.next_load_s(60.0) == asleep.ASSUMED_WAKE_S
    assert on.keeper.next_load_s(0.5) == 0.5
    await on.stay()  # woken
    assert on.keeper.next_load_s(60.0) == 60.0
    on.made[0].kill()
    await on.stay()  # built again
    assert on.keeper.next_load_s(60.0) == asleep.ASSUMED_WAKE_S
    await on.keeper.end()


async def test_an_engine_that_cannot_sleep_is_expected_to_start_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(asleep, "SLEEP_S", 0.3)
    on = Stays("fails")
    await on.stay()
    assert not on.keeper.works and on.keeper.next_load_s(60.0) == 60.0


async def test_an_engine_that_dies_asleep_is_replaced_and_goes_on_sleeping(
    caplog: pytest.LogCaptureFixture,
) -> None:
    on = Stays("well")
    for _ in range(2):
        (await on.stay()).kill()
        await on.stay()
    assert len(on.made) == 3 and on.keeper.works and not failed(caplog)
    await on.keeper.end()


async def test_an_engine_that_never_wakes_alive_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def die(self: SimulatedEngine) -> None:
        self._die()
        raise EngineDead("it died while it woke")

    monkeypatch.setattr(SimulatedEngine, "wake_up", die)
    on = Stays("well")
    for _ in range(4):
        await on.stay()
    assert not on.keeper.works and "died 2 times in a row" in failed(caplog)[0]
    assert len(on.made) == 4


async def test_a_stop_of_the_worker_does_not_wait_for_a_sleep() -> None:
    engine = SimulatedEngine(4, 0.0, sleep_as="hangs")
    keeper = Asleep(MODEL, ASLEEP_BYTES)
    capacity: Any = SimpleNamespace()
    assert not await keeper.keep(engine, capacity, lambda: False)
    assert keeper.works
