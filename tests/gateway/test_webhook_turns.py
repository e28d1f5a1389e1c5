"""Receivers that do not answer hold up nobody but themselves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.gateways.gateway_process import GatewayProcess
from kit.gateways.own_carrier import opened, record
from kit.servers.webhook_receiver import Receiver

from demo.stack import RedisServer, eventually
from gateway.batches.runner.after import announce
from gateway.http.services import Services
from gateway.redis.webhooks import Webhooks


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    """Return what a gateway works with, on a Redis of its own; private addresses are allowed."""
    server = RedisServer(tmp_path / "redis").start()
    with opened(server.url, tmp_path, gateway_private_webhooks=True) as found:
        yield found
    server.stop()


def end(services: Services, tenant: str, batch_id: str) -> None:
    """Announce the end of a batch."""
    now = int(time.time())
    ended = {"status": "completed", "changed_at": {"completed": now}}
    announce(services, record(now, batch_id, tenant=tenant, **ended))


def gateway(services: Services, folder: Path) -> GatewayProcess:
    url = services.settings.redis_url.get_secret_value()
    return GatewayProcess(url, folder, gateway_private_webhooks=True)


def listen(services: Services, tenant: str, url: str) -> Any:
    return Webhooks.beside(services.batches).create(tenant, url, ("batch.completed",))


def test_a_receiver_that_hangs_delays_no_other_tenants_events(
    services: Services, tmp_path: Path
) -> None:
    with Receiver(stays=120) as hanging, Receiver() as prompt:
        listen(services, "w1", hanging.url)
        listen(services, "w2", prompt.url)
        for n in range(150):
            end(services, "w1", f"batch_w1_{n}")
        with gateway(services, tmp_path):
            hanging.wait(2)
            end(services, "w2", "batch_w2")
            prompt.wait(timeout_s=5)
            assert len(hanging.got) == 2
            # None was answered in time: from now on all of it waits, and is tried with one.
            eventually(lambda: len(hanging.got) == 3, 40, "it is tried again")
            end(services, "w2", "batch_w2_again")
            prompt.wait(2, timeout_s=5)
            assert len(hanging.got) == 3


def test_many_receivers_that_hang_leave_room_for_others(services: Services, tmp_path: Path) -> None:
    with Receiver(stays=120) as hanging, Receiver() as prompt:
        for n in range(40):
            listen(services, f"w{n}", hanging.url)
        for n in range(200):
            end(services, f"w{n % 40}", f"batch_{n}")
        listen(services, "other", prompt.url)
        with gateway(services, tmp_path):
            hanging.wait(16)
            end(services, "other", "batch_other")
            # As a new one it shares places with the 40, which hold each of them for 10 s.
            prompt.wait(timeout_s=50)
            # Since it has answered, it waits for none of them: many times, within one time-out.
            for n in range(4):
                end(services, "other", f"batch_again_{n}")
                prompt.wait(n + 2, timeout_s=9)
            assert len(hanging.got) < 200


def test_a_receiver_that_answers_again_gets_all_that_has_waited(
    services: Services, tmp_path: Path
) -> None:
    with Receiver(stays=12) as slow:
        listen(services, "w1", slow.url)
        for n in range(30):
            end(services, "w1", f"batch_{n}")
        with gateway(services, tmp_path):
            slow.wait(2)
            slow.release.set()  # from now on it answers at once
            eventually(lambda: len(set(slow.ids())) == 30, 60, "all are delivered")


def test_a_receiver_that_answers_gets_a_crowd_of_events_soon(
    services: Services, tmp_path: Path
) -> None:
    with Receiver() as prompt:
        listen(services, "w1", prompt.url)
        for n in range(300):
            end(services, "w1", f"batch_{n}")
        with gateway(services, tmp_path):
            eventually(lambda: len(set(prompt.ids())) == 300, 40, "all are delivered")
        assert len(prompt.got) == 300
