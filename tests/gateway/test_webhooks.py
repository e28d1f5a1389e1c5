"""Webhooks: real gateways POST to a real receiver, which verifies with the openai SDK."""

from __future__ import annotations

import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest
from kit.commands.support import chat_line, producer_command, producer_env
from kit.gateways.gateway_process import GatewayProcess
from kit.gateways.own_batch_runner import opened, record
from kit.servers.webhook_receiver import Receiver
from kit.stacks.celery_side import simulated

from demo.stack import RedisServer, eventually
from gateway.batches.api.record import Status, note_webhooks
from gateway.http.services import Services
from gateway.redis.webhooks import Webhooks
from gateway.settings import LEASE_S
from gateway.webhooks.delivering import LOOK_S, DeliveryPool

SDK = openai.OpenAI(api_key="none")


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis")).start()
    yield server
    server.stop()


@pytest.fixture
def services(redis_server: RedisServer, tmp_path: Path) -> Iterator[Services]:
    """Return what a gateway works with, on an empty Redis; private addresses are allowed."""
    redis_server.client().flushall()
    with opened(redis_server.url, tmp_path, gateway_private_webhooks=True) as found:
        yield found


def ended(batch_id: str = "batch_1", status: Status = "completed", tenant: str = "default") -> Any:
    """Return the record of a batch that has ended."""
    now = int(time.time())
    return record(now, batch_id, tenant=tenant, status=status, changed_at={status: now})


def endpoint(services: Services, url: str, *events: str, tenant: str = "default") -> Any:
    """Make an endpoint of a tenant."""
    return Webhooks.using(services.batches).create(tenant, url, events or ("batch.completed",))


def gateway(services: Services, folder: Path, **settings: object) -> GatewayProcess:
    """Return a gateway on the same Redis, not started."""
    url = services.settings.redis_url.get_secret_value()
    return GatewayProcess(url, folder, **({"gateway_private_webhooks": True} | settings))


def due(services: Services) -> dict[bytes, float]:
    """Return the deliveries that are still to be made, with their times in ms."""
    raw: Any = services.due._client
    return dict(raw.zrange("warmq:gateway:due:webhook", 0, -1, withscores=True))


def hurry(services: Services) -> None:
    """Bring forward what waits for its next try."""
    for delivery_id in due(services):
        services.due.add("webhook", delivery_id.decode())


def deliver_due(services: Services) -> int:
    """Try what is due now, wait for its end, and return how many tries that were."""
    current, count = DeliveryPool(services), 0
    while (taken := current.take()) or current.wait(LOOK_S):
        count += taken
    return count


@pytest.mark.parametrize("status", ["completed", "failed", "expired", "cancelled"])
def test_the_sdk_verifies_what_a_gateway_sends_at_a_batchs_end(
    services: Services, tmp_path: Path, status: Status
) -> None:
    with Receiver() as receiver:
        made = endpoint(services, receiver.url, f"batch.{status}")
        with gateway(services, tmp_path):
            note_webhooks(services, ended(status=status))
            receiver.wait()
        headers, body = receiver.got[0]
        event = SDK.webhooks.unwrap(body, headers, secret=made.secret)
        assert event.type == f"batch.{status}" and event.data.id == "batch_1"
        with pytest.raises(openai.InvalidWebhookSignatureError):
            SDK.webhooks.unwrap(body + b" ", headers, secret=made.secret)


def test_endpoints_hear_only_of_their_tenants_batches_and_of_the_events_they_name(
    services: Services,
) -> None:
    with Receiver() as receiver:
        endpoint(services, receiver.url, "batch.failed")
        note_webhooks(services, ended("batch_1", "completed"))
        note_webhooks(services, ended("batch_2", "failed", tenant="other"))
        note_webhooks(services, ended("batch_3", "in_progress"))
        assert deliver_due(services) == 0
        note_webhooks(services, ended("batch_4", "failed"))
        assert deliver_due(services) == 1
        assert b"batch_4" in receiver.got[0][1]


def test_a_batch_that_is_announced_again_is_told_once(services: Services) -> None:
    with Receiver() as receiver:
        endpoint(services, receiver.url)
        note_webhooks(services, ended())
        note_webhooks(services, ended())
        deliver_due(services)
        note_webhooks(services, ended())
        deliver_due(services)
        assert len(receiver.got) == 1
        assert not due(services)


def test_a_receiver_that_fails_is_tried_again_with_the_same_id_and_a_new_signature(
    services: Services, tmp_path: Path
) -> None:
    with Receiver(lambda n: 500 if n < 3 else 204) as receiver:
        made = endpoint(services, receiver.url)
        with gateway(services, tmp_path) as running:
            note_webhooks(services, ended())
            began = time.monotonic()
            receiver.wait(2)
            assert time.monotonic() - began > 4  # five seconds, but for the clock's rounding
            eventually(lambda: max(due(services).values()) > time.time() * 1000 + 20_000, 10)
            hurry(services)
            receiver.wait(3)
            eventually(lambda: not due(services), 10, "the delivery ends")
            assert made.secret not in running.log_path.read_text()
        assert len(set(receiver.ids())) == 1
        first, second = receiver.got[0], receiver.got[1]
        assert first[1] == second[1]
        assert first[0]["webhook-timestamp"] != second[0]["webhook-timestamp"]
        for headers, body in receiver.got:
            SDK.webhooks.unwrap(body, headers, secret=made.secret)


@pytest.mark.parametrize("status", [302, 400, 404, 429, 503])
def test_all_answers_but_2xx_and_410_are_tried_again(services: Services, status: int) -> None:
    with Receiver(lambda _: status) as receiver:
        endpoint(services, receiver.url)
        note_webhooks(services, ended())
        deliver_due(services)
        assert len(receiver.got) == 1  # also of a redirect, which nobody follows
        assert len(due(services)) == 1


def test_410_removes_the_endpoint(services: Services) -> None:
    with Receiver(lambda _: 410) as receiver:
        endpoint(services, receiver.url)
        note_webhooks(services, ended())
        deliver_due(services)
        assert not Webhooks.using(services.batches).all()
        assert not due(services)


def test_a_delivery_is_given_up_after_three_days(services: Services) -> None:
    with Receiver(lambda _: 500) as receiver:
        endpoint(services, receiver.url)
        record = ended()
        record.changed_at["completed"] -= 3 * 86400
        note_webhooks(services, record)
        deliver_due(services)
        assert len(receiver.got) == 1 and not due(services)


def test_two_gateways_deliver_once_for_each_try(services: Services, tmp_path: Path) -> None:
    with Receiver() as receiver:
        endpoint(services, receiver.url)
        with gateway(services, tmp_path), gateway(services, tmp_path):
            for n in range(60):
                note_webhooks(services, ended(f"batch_{n}"))
            receiver.wait(60)
            eventually(lambda: not due(services), 20, "all deliveries end")
        assert set(Counter(receiver.ids()).values()) == {1} and len(receiver.got) == 60


def test_a_delivery_outlives_the_gateway_that_was_at_it(services: Services, tmp_path: Path) -> None:
    with Receiver(stays=60) as receiver:
        endpoint(services, receiver.url)
        dying = gateway(services, tmp_path).start()
        note_webhooks(services, ended())
        receiver.wait()
        dying.kill()
        receiver.release.set()
        with gateway(services, tmp_path):
            receiver.wait(2, timeout_s=20)
            eventually(lambda: not due(services), 10, "the delivery ends")
        assert len(set(receiver.ids())) == 1


def test_a_batch_announced_while_no_gateway_lives_is_told_by_the_next(
    services: Services, tmp_path: Path
) -> None:
    with Receiver() as receiver:
        endpoint(services, receiver.url)
        note_webhooks(services, ended())
        with gateway(services, tmp_path):
            receiver.wait()


def test_a_slow_receiver_keeps_its_lease_and_holds_up_nobody(
    services: Services, tmp_path: Path
) -> None:
    with Receiver(stays=LEASE_S + 3) as slow, Receiver() as fast:
        endpoint(services, slow.url)
        endpoint(services, fast.url)
        with gateway(services, tmp_path), gateway(services, tmp_path):
            note_webhooks(services, ended())
            fast.wait(timeout_s=3)
            eventually(lambda: not due(services), 20, "both deliveries end")
        assert len(slow.got) == 1 and len(fast.got) == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]"])
def test_private_addresses_are_refused_unless_allowed(
    services: Services, tmp_path: Path, host: str
) -> None:
    with Receiver() as receiver:
        made = endpoint(services, receiver.url.replace("127.0.0.1", host) + "?token=secret-1")
        running = gateway(services, tmp_path, gateway_private_webhooks=False)
        with running:
            note_webhooks(services, ended())
            eventually(lambda: "no public address" in running.log_path.read_text(), 15)
        assert not receiver.got and len(due(services)) == 1
        log = running.log_path.read_text()
        assert made.secret not in log and "secret-1" not in log


def test_a_receiver_that_sends_for_ever_is_left(services: Services) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            sock, _ = server.accept()
            try:
                sock.sendall(b"HTTP/1.1 200 OK\r\n")
                while True:
                    sock.sendall(b"x: y\r\n")
                    time.sleep(0.2)
            except OSError:
                sock.close()

        threading.Thread(target=drip, daemon=True).start()
        endpoint(services, f"http://127.0.0.1:{server.getsockname()[1]}/")
        note_webhooks(services, ended())
        began = time.monotonic()
        deliver_due(services)
        assert 8 < time.monotonic() - began < 40
        assert len(due(services)) == 1


def test_the_command_line_makes_lists_and_deletes_endpoints(services: Services) -> None:
    def producer(*args: str, status: int = 0) -> Any:
        url = services.settings.redis_url.get_secret_value()
        done = subprocess.run(
            producer_command("webhooks", *args), env=producer_env(url), capture_output=True,
            timeout=30, check=False,
        )  # fmt: skip
        assert done.returncode == status, done.stderr.decode()
        return done

    secret = producer("create", "--tenant", "a", "--url", "https://example.org/x").stdout.decode()
    assert secret.startswith("whsec_") and len(secret.split()) == 1
    (made,) = Webhooks.using(services.batches).all()
    assert made.secret == secret.strip() and made.tenant == "a" and len(made.events) == 4
    listed = producer("list").stdout.decode() + producer("list", "--json").stdout.decode()
    assert made.id in listed and "https://example.org/x" in listed and secret.strip() not in listed
    producer("delete", made.id)
    assert not Webhooks.using(services.batches).all()
    assert b"webhooks list" in producer("delete", made.id, status=2).stderr
    for wrong in ("ftp://x/", "https://", "https://user:pw@x/", "https://x/#a", "http://x:99999/"):
        assert b"--url" in producer("create", "--url", wrong, status=2).stderr
    asked = ("create", "--url", "https://x/", "--events", "batch.done")
    assert b"batch.done" in producer(*asked, status=2).stderr


def test_an_ended_batch_is_told_also_if_its_gateway_is_killed_at_the_end(
    services: Services, tmp_path: Path
) -> None:
    url = services.settings.redis_url.get_secret_value()
    worker = simulated(url, tmp_path / "worker.log", served_model_name="small")
    with Receiver(lambda n: 503 if n == 1 else 200) as receiver:
        made = endpoint(services, receiver.url)
        dying = gateway(services, tmp_path).start()
        try:
            worker.start()
            sdk = openai.OpenAI(base_url=f"{dying.url}/v1", api_key="none")
            line = orjson.dumps(chat_line("r0", model="small"))
            source = sdk.files.create(file=("in.jsonl", line), purpose="batch")
            batch = sdk.batches.create(
                input_file_id=source.id, endpoint="/v1/chat/completions", completion_window="24h"
            )
            eventually(lambda: sdk.batches.retrieve(batch.id).status == "completed", 30)
        finally:
            dying.kill()
            worker.kill()
        with gateway(services, tmp_path):
            receiver.wait(2, timeout_s=20)
            eventually(lambda: not due(services), 10, "the delivery ends")
        assert len(set(receiver.ids())) == 1
        headers, body = receiver.got[-1]
        event: Any = SDK.webhooks.unwrap(body, headers, secret=made.secret)
        assert (event.type, event.data.id) == ("batch.completed", batch.id)


# -- receivers that do not answer hold up nobody but themselves ------------------------------------


def test_a_receiver_that_hangs_delays_no_other_tenants_events(
    services: Services, tmp_path: Path
) -> None:
    with Receiver(stays=120) as hanging, Receiver() as prompt:
        endpoint(services, hanging.url, tenant="w1")
        endpoint(services, prompt.url, tenant="w2")
        for n in range(150):
            note_webhooks(services, ended(f"batch_w1_{n}", tenant="w1"))
        with gateway(services, tmp_path):
            hanging.wait(2)
            note_webhooks(services, ended("batch_w2", tenant="w2"))
            prompt.wait(timeout_s=5)
            assert len(hanging.got) == 2
            # None was answered in time: from now on all of it waits, and is tried with one.
            eventually(lambda: len(hanging.got) == 3, 40, "it is tried again")
            note_webhooks(services, ended("batch_w2_again", tenant="w2"))
            prompt.wait(2, timeout_s=5)
            assert len(hanging.got) == 3


def test_many_receivers_that_hang_leave_room_for_others(services: Services, tmp_path: Path) -> None:
    with Receiver(stays=120) as hanging, Receiver() as prompt:
        for n in range(40):
            endpoint(services, hanging.url, tenant=f"w{n}")
        for n in range(200):
            note_webhooks(services, ended(f"batch_{n}", tenant=f"w{n % 40}"))
        endpoint(services, prompt.url, tenant="other")
        with gateway(services, tmp_path):
            hanging.wait(16)
            note_webhooks(services, ended("batch_other", tenant="other"))
            # As a new one it shares places with the 40, which hold each of them for 10 s.
            prompt.wait(timeout_s=50)
            # Since it has answered, it waits for none of them: many times, within one time-out.
            for n in range(4):
                note_webhooks(services, ended(f"batch_again_{n}", tenant="other"))
                prompt.wait(n + 2, timeout_s=9)
            assert len(hanging.got) < 200


def test_a_receiver_that_answers_again_gets_all_that_has_waited(
    services: Services, tmp_path: Path
) -> None:
    with Receiver(stays=12) as slow:
        endpoint(services, slow.url, tenant="w1")
        for n in range(30):
            note_webhooks(services, ended(f"batch_{n}", tenant="w1"))
        with gateway(services, tmp_path):
            slow.wait(2)
            slow.release.set()  # from now on it answers at once
            eventually(lambda: len(set(slow.ids())) == 30, 60, "all are delivered")


def test_a_receiver_that_answers_gets_a_crowd_of_events_soon(
    services: Services, tmp_path: Path
) -> None:
    with Receiver() as prompt:
        endpoint(services, prompt.url, tenant="w1")
        for n in range(300):
            note_webhooks(services, ended(f"batch_{n}", tenant="w1"))
        with gateway(services, tmp_path):
            eventually(lambda: len(set(prompt.ids())) == 300, 40, "all are delivered")
        assert len(prompt.got) == 300
