"""How often the order of deadlines is read, and what an outage changes."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
from kit.drain.draining import soon

from contract.errors import StoreUnavailable
from worker.drain import deadlines
from worker.drain.deadlines import EVERY_S, MOST_URGENT, PAUSE_FOR_READ, DeadlineOrder


class Leases:
    """A queue that has deadlines or not, or a Redis that is away."""

    queue, worker_id = "warmq", "w"
    any, away, asked = True, False, 0

    async def has_deadlines(self) -> bool:
        self.asked += 1
        if self.away:
            raise StoreUnavailable("away")
        return self.any


def drain() -> Any:
    outage = SimpleNamespace(lost=lambda error: None)
    return SimpleNamespace(leases=Leases(), urgent=(), outage=outage)


async def test_a_queue_without_deadlines_is_not_read() -> None:
    of, reads = drain(), list[str]()
    order = DeadlineOrder(of, lambda queue: (reads.append(queue), ("a",))[1])
    await order.read_once()
    assert (of.urgent, reads) == (("a",), ["warmq"])
    of.leases.any = False
    await order.read_once()
    assert (of.urgent, reads) == ((), ["warmq"])


async def test_a_slow_read_is_followed_by_a_pause_of_a_hundred_times_its_time() -> None:
    def slow(_: str) -> tuple[str, ...]:
        time.sleep(0.05)  # the read takes its time
        return ("a",) * 200

    of = drain()
    order = DeadlineOrder(of, lambda _: ())
    await order.read_once()
    assert order.pause_s == EVERY_S
    order = DeadlineOrder(of, slow)
    await order.read_once()
    assert order.pause_s >= 0.05 * PAUSE_FOR_READ > EVERY_S
    assert len(of.urgent) == MOST_URGENT


async def test_an_outage_and_malformed_data_keep_the_last_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deadlines, "EVERY_S", 0.0)
    monkeypatch.setattr(deadlines, "PAUSE_FOR_READ", 0)
    of, raising = drain(), list[Exception]()

    def read(_: str) -> tuple[str, ...]:
        if raising:
            raise raising[0]
        return ("a",)

    order = DeadlineOrder(of, read)
    order.pause_s = 0.0
    running = asyncio.create_task(order.run())

    async def more() -> None:
        until = of.leases.asked + 3
        await soon(lambda: of.leases.asked >= until)

    await more()
    assert of.urgent == ("a",)
    raising.append(ValueError("not a number"))
    await more()
    of.leases.away = True
    await more()
    assert (of.urgent, running.done()) == (("a",), False)
    running.cancel()
    await asyncio.wait([running])
