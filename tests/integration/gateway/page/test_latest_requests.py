"""The batch page's latest requests are those that ended last, also after a retry."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kit.commands.support import finish
from kit.protocol.lessee import Lessee, client_of, submit_batch

from contract.message import read_delivery
from contract.redis.batches import BatchStore
from gateway.page import requests
from gateway.page.requests import sample


def test_they_are_those_that_ended_last_after_a_cancel_and_a_retry(
    store: BatchStore, monkeypatch: Any
) -> None:
    monkeypatch.setattr(requests, "SAMPLE", 3)
    submitted, lessee = submit_batch(store, 10), Lessee(client_of(store))
    finish(lessee, lessee.pop(2))
    batch = store.batch(submitted.id)
    assert batch is not None
    store.cancel(batch)
    assert store.retry(batch, ("cancelled",)) == 8
    leases = lessee.pop(8)
    for lease in reversed(leases):  # not in the order in which they were cancelled
        finish(lessee, [lease])
    batch = store.batch(submitted.id)
    assert batch is not None
    services: Any = SimpleNamespace(batches=store)
    names = [one["custom_id"] for one in sample(services, [batch]).last]
    ended = [read_delivery(lease.id, lease.message).custom_id for lease in leases]
    assert names == ended[:3]
