"""What becomes of deliveries when something fails on the gateway's own side."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.gateways.own_batch_runner import TENANT, opened, record

from contract.errors import StoreUnavailable
from demo.stack import eventually
from gateway.batches.api.record import note_webhooks
from gateway.http.services import Services
from gateway.redis.webhooks import Webhooks
from gateway.settings import LEASE_S
from gateway.webhooks import delivering
from gateway.webhooks.delivering import LOOK_S, DeliveryPool, _deliver_until


@pytest.fixture
def services(redis_url: str, tmp_path: Path) -> Iterator[Services]:
    """Return what a gateway works with, and one endpoint, which has four deliveries."""
    with opened(redis_url, tmp_path) as found:
        events = ("batch.completed",)
        Webhooks.using(found.batches).create(TENANT, "https://receiver.example/", events)
        now = int(time.time())
        for n in range(4):
            ended = record(now, f"batch_{n}", status="completed", changed_at={"completed": now})
            note_webhooks(found, ended)
        yield found


@pytest.fixture
def posts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what was posted; each post fails as none has before."""
    tried: list[str] = []

    def fails(url: str, *_: Any, **__: Any) -> int:
        tried.append(url)
        raise RuntimeError

    monkeypatch.setattr(delivering, "post", fails)
    return tried


def until_idle(current: DeliveryPool) -> None:
    while current.take() + current.wait(LOOK_S):
        pass


def test_a_try_that_failed_here_is_no_answer(services: Services, posts: list[str]) -> None:
    until_idle(DeliveryPool(services))
    assert len(posts) == 2, "the others wait with their endpoint"


def test_no_lease_is_renewed_of_what_could_not_be_sent_away(
    services: Services, posts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any) -> bool:
        raise StoreUnavailable("away")

    current = DeliveryPool(services)
    with monkeypatch.context() as patched:
        patched.setattr(services.due, "release", away)
        with pytest.raises(StoreUnavailable):
            until_idle(current)
    assert len(posts) == 2 and not current._leases._held


def test_a_try_for_which_there_is_no_thread_ends(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def none_for_webhooks(thread: threading.Thread) -> None:
        if thread.name == "webhook":
            raise RuntimeError("can't start new thread")
        start(thread)

    current = DeliveryPool(services)
    monkeypatch.setattr(threading.Thread, "start", none_for_webhooks)
    until_idle(current)
    assert not current._leases._held


def test_a_gateway_that_ends_gives_back_what_waits_for_its_turn(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[DeliveryPool] = []
    begun, answered, stop = threading.Event(), threading.Event(), threading.Event()

    def answers_late(*_: Any, **__: Any) -> int:
        begun.set()
        answered.wait(30)
        return 200

    def made(services: Services) -> DeliveryPool:
        rounds.append(DeliveryPool(services))
        return rounds[0]

    monkeypatch.setattr(delivering, "post", answers_late)
    monkeypatch.setattr(delivering, "DeliveryPool", made)
    thread = threading.Thread(target=_deliver_until, args=(services, stop), daemon=True)
    thread.start()
    try:
        assert begun.wait(10)
        stop.set()
        thread.join(10)
        # The one that is being tried is not given to another gateway meanwhile.
        assert len(services.due.claim("webhook", round(LEASE_S * 1000), 10)) == 3
    finally:
        stop.set()
        answered.set()
    eventually(lambda: not rounds[0]._leases._held, 10, "its lease is renewed no more")
