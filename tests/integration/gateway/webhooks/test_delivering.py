"""What becomes of deliveries when something fails on the gateway's own side."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.gateways.own_carrier import TENANT, opened, record

from gateway.batches.runner.after import announce
from gateway.http.services import Services
from gateway.redis.webhooks import Webhooks
from gateway.webhooks import delivering
from gateway.webhooks.delivering import LOOK_S, Round


@pytest.fixture
def services(redis_url: str, tmp_path: Path) -> Iterator[Services]:
    """Return what a gateway works with, and one endpoint, which has four deliveries."""
    with opened(redis_url, tmp_path) as found:
        events = ("batch.completed",)
        Webhooks.beside(found.batches).create(TENANT, "https://receiver.example/", events)
        now = int(time.time())
        for n in range(4):
            ended = record(now, f"batch_{n}", status="completed", changed_at={"completed": now})
            announce(found, ended)
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


def until_idle(current: Round) -> None:
    while current.take() + current.look(LOOK_S):
        pass


def test_a_try_that_failed_here_is_no_answer(services: Services, posts: list[str]) -> None:
    until_idle(Round(services))
    assert len(posts) == 2, "the others wait with their endpoint"
