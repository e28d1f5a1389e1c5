"""What the observer of turns (tests/kit/verdicts/fairness.py) objects to, and what is no turn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.protocol.lessee import Lessee, submit_batch
from kit.protocol.turn_steps import end
from kit.verdicts.fairness import unfair
from kit.verdicts.observer import WATCHED

from contract.redis.batches import BatchStore
from contract.redis.tenants import Tenant
from demo.stack import RedisServer

SLOTS = 16


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[RedisServer]:
    """Return a Redis whose append-only file can be read."""
    with RedisServer(tmp_path / "redis", *WATCHED, "--appendfsync", "always") as server:
        yield server


@pytest.mark.parametrize("way", ["handed back", "run"])
def test_a_turn_counts_that_is_run(watched: RedisServer, way: str) -> None:
    """A worker that did not get a POP's reply names the same turn once more."""
    with watched.client() as client:
        worker, store = Lessee(client), BatchStore(client, ttl_ms=600_000)
        for name in ("a", "b"):
            submit_batch(store, 100, batch_id=name, tenant=name)
        begun = worker.pop(1, slots=SLOTS)
        turn = worker.turn
        more = worker.pop(SLOTS - 1, slots=SLOTS)
        worker.turn = turn
        more += worker.pop(SLOTS - 1, slots=SLOTS)
        if way == "handed back":
            worker.release(*more)
        else:
            worker.done(*more)
        worker.done(*begun)
        found = unfair(watched.folder, SLOTS)
    assert bool(found) == (way == "run"), found


def test_turns_in_their_order_are_fair(watched: RedisServer) -> None:
    with watched.client() as client:
        store = BatchStore(client, ttl_ms=600_000)
        workers = [Lessee(client, worker=f"w{n}") for n in range(3)]
        for name in ("a", "b", "c"):
            submit_batch(store, 200, batch_id=name, tenant=name)
        for n in range(30):
            worker = workers[n % 3]
            leases = worker.pop(5, slots=SLOTS)
            if n % 2:
                end(worker, leases, "failed", keep=True)
            else:
                worker.done(*leases)
        found = unfair(watched.folder, SLOTS)
    assert found == []


def test_who_lost_its_cap_waits_for_the_next_sweep(watched: RedisServer) -> None:
    with watched.client() as client:
        worker, store = Lessee(client), BatchStore(client, ttl_ms=600_000)
        store.set_tenant(Tenant("a", max_in_flight=1))
        submit_batch(store, 10, batch_id="a", tenant="a")
        leases = worker.pop(5, slots=SLOTS)
        store.set_tenant(Tenant("a"))
        worker.done(*leases)
        waits = unfair(watched.folder, SLOTS)
        worker.sweep()
        assert worker.pop(5, slots=SLOTS)
        found = unfair(watched.folder, SLOTS)
    assert len(leases) == 1
    assert waits == found == []
