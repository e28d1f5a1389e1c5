"""What a gateway's /metrics tells of Redis, by one snapshot after the other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from kit.protocol.lessee import submit_batch

from contract.redis.batches import BatchStore
from gateway.metrics import routes
from gateway.metrics.routes import MOST_TENANTS, STALE_S, Snapshots
from gateway.metrics.series import Requests


@pytest.fixture
def snapshots(store: BatchStore) -> Snapshots:
    settings = SimpleNamespace(queue="warmq", high_water=0.6)
    services: Any = SimpleNamespace(batches=store, settings=settings)
    return Snapshots(services, Requests([]))


def told(snapshots: Snapshots) -> dict[str, list[tuple[dict[str, str], float]]]:
    return {
        family.name: [(sample.labels, sample.value) for sample in family.samples]
        for family in snapshots.collect()
    }


async def test_a_snapshot_is_not_told_any_more_when_it_is_old(
    snapshots: Snapshots, store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit_batch(store, 3)
    await snapshots._take()
    assert told(snapshots)["warmq_redis_up"] == [({}, 1)]
    later = routes.time.monotonic() + STALE_S
    monkeypatch.setattr(routes, "time", SimpleNamespace(monotonic=lambda: later))
    found = told(snapshots)
    assert found["warmq_redis_up"] == [({}, 0)]
    assert "warmq_waiting" not in found


async def test_a_tenant_that_is_named_stays_named_and_later_ones_are_told_together(
    snapshots: Snapshots, store: BatchStore
) -> None:
    for n in range(MOST_TENANTS):
        submit_batch(store, 1, batch_id=f"b{n}", tenant=f"t{n}")
    await snapshots._take()
    submit_batch(store, 9, batch_id="late", tenant="late")
    await snapshots._take()
    waiting = {
        labels["tenant"]: count for labels, count in told(snapshots)["warmq_waiting"] if count
    }
    assert waiting == {f"t{n}": 1 for n in range(MOST_TENANTS)} | {"other": 9}
