"""`submit --notify`: a worker tells a receiver of a batch's end, whoever ends the batch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import redis
from kit.commands.support import run_producer
from kit.drain.draining import draining
from kit.protocol.lessee import Lessee
from kit.servers.webhook_receiver import Receiver

from contract.redis import keys
from demo.stack import eventually
from producer import Client
from worker.drain import notifier

DUE = keys.NOTIFY


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers look for webhooks often, and try them again at once."""
    monkeypatch.setattr(notifier, "EVERY_S", 0.05)
    monkeypatch.setattr(notifier, "FIRST_S", 0)
    monkeypatch.setattr(notifier, "LONGEST_S", 0)


def verified(receiver: Receiver, secret: str) -> list[Any]:
    """Return the events that the receiver got, as the SDK verifies them."""
    client = openai.OpenAI(api_key="none")
    return [client.webhooks.unwrap(body, head, secret=secret) for head, body in receiver.got]


async def until(look: Callable[[], bool]) -> None:
    """Let the loop run until this is so."""
    await asyncio.to_thread(eventually, look)


async def test_the_end_of_a_batch_is_told_once_and_signed(
    redis_url: str, redis_client: redis.Redis
) -> None:
    with Receiver() as receiver, Client(redis_url) as client:
        batch = client.submit([{"prompt": "a"}, {"prompt": "b"}], notify=receiver.url)
        client.submit([{"prompt": "c"}])
        async with draining(redis_url, gateway_private_webhooks=True):
            await until(lambda: receiver.got and not redis_client.exists(DUE, f"{DUE}:held"))
        (event,) = verified(receiver, client.webhook_secret)
    assert (event.type, event.data.id) == ("batch.completed", batch.id)


async def test_a_cancelled_batch_is_told_and_a_retried_one_again(redis_url: str) -> None:
    with Receiver() as receiver, Client(redis_url) as client:
        batch = client.submit([{"prompt": "a"}], notify=receiver.url)
        batch.cancel()
        async with draining(redis_url, gateway_private_webhooks=True):
            await until(lambda: len(receiver.got) >= 1)
            batch.retry("cancelled")
            await until(lambda: len(receiver.got) >= 2)
        events = verified(receiver, client.webhook_secret)
    assert [event.type for event in events] == ["batch.cancelled", "batch.completed"]
    assert len({*receiver.ids()}) == 2


async def test_a_receiver_that_fails_is_tried_again_with_the_same_id(redis_url: str) -> None:
    with Receiver(lambda count: 500 if count < 3 else 200) as receiver, Client(redis_url) as client:
        client.submit([{"prompt": "a"}], notify=receiver.url)
        async with draining(redis_url, gateway_private_webhooks=True):
            await until(lambda: len(receiver.got) >= 3)
        assert len({*receiver.ids()}) == 1
        assert len(verified(receiver, client.webhook_secret)) == 3


async def test_private_addresses_are_refused_unless_allowed(
    redis_url: str, redis_client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    with Receiver() as receiver, Client(redis_url) as client:
        client.submit([{"prompt": "a"}], notify=receiver.url)
        async with draining(redis_url):
            await until(lambda: "no public address" in caplog.text)
        assert receiver.url not in caplog.text
        assert not receiver.got
    assert redis_client.zcard(DUE) == 1


async def test_a_deleted_batchs_webhook_is_dropped(
    redis_url: str, redis_client: redis.Redis
) -> None:
    redis_client.zadd(DUE, {"gone": 1})
    redis_client.set(keys.NOTIFY_SIGNING, "whsec_AAAA")
    async with draining(redis_url):
        await until(lambda: not redis_client.zcard(DUE))
    assert not redis_client.exists(keys.batch_key("gone"))


async def test_a_batch_that_ends_again_during_a_try_is_told_twice(redis_url: str) -> None:
    def answer(count: int) -> int:
        if count == 1:
            batch.retry("cancelled")
            batch.cancel()
        return 200

    with Receiver(answer) as receiver, Client(redis_url) as client:
        batch = client.submit([{"prompt": "a"}], model="nobody", notify=receiver.url)
        batch.cancel()
        async with draining(redis_url, gateway_private_webhooks=True):
            await until(lambda: len(receiver.got) >= 2)
        assert len({*receiver.ids()}) == 2
        first, second = verified(receiver, client.webhook_secret)
    assert first.type == second.type
    assert first.id != second.id


@pytest.mark.parametrize("retired", [False, True])
async def test_a_batch_that_an_older_worker_ended_is_told_once(
    redis_url: str, redis_client: redis.Redis, retired: bool
) -> None:
    with Receiver() as receiver, Client(redis_url) as client:
        batch = client.submit([{"prompt": "a"}], model="nobody", notify=receiver.url)
        batch.cancel()
        assert redis_client.zrem(DUE, batch.id)  # 0.2.0 makes no webhook due
        if retired:
            redis_client.zrem(keys.RETIRING, batch.id)
        async with draining(redis_url, gateway_private_webhooks=True):
            await until(lambda: len(receiver.got) >= 1)
            await until(lambda: not redis_client.zcard(DUE))
        lessee, key = Lessee(redis_client), keys.batch_key(batch.id)
        lessee.sweep()
        assert lessee.run("retire", batch.id, redis_client.hget(key, "life"), 60_000, 1) == 1
        assert not redis_client.zcard(DUE)
    assert len(receiver.got) == 1


async def test_status_shows_the_webhook(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def status(*words: str) -> str:
        done = run_producer("status", batch.id, *words, redis_url=redis_url)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def webhook() -> Any:
        return json.loads(status("--json"))["webhook"]

    monkeypatch.setattr(notifier, "FIRST_S", 3600)
    monkeypatch.setattr(notifier, "LONGEST_S", 3600)
    with Receiver(lambda _: 500) as receiver, Client(redis_url) as client:
        other = client.submit([{"prompt": "b"}])
        batch = client.submit([{"prompt": "a"}], model="nobody", notify=receiver.url)
        assert (webhook()["url"], webhook()["state"]) == (receiver.url, "waiting")
        batch.cancel()
        assert (webhook()["state"], webhook()["tried_at"]) == ("due", None)
        async with draining(redis_url, gateway_private_webhooks=True):
            await until(lambda: len(receiver.got) >= 1 and bool(webhook()["problem"]))
            found = webhook()
            assert (found["state"], found["problem"]) == ("due", "the receiver answered 500")
            assert found["tried_at"] < found["next_try_at"]
            assert "the receiver answered 500" in status()
            monkeypatch.setattr(notifier, "TRIED_S", 0)
            batch.retry("cancelled")
            assert webhook()["state"] == "waiting"
            batch.cancel()
            await until(lambda: webhook()["state"] == "given_up")
            assert webhook()["next_try_at"] is None
        batch = other
        assert webhook() is None


async def test_status_shows_a_delivered_webhook(redis_url: str) -> None:
    with Receiver() as receiver, Client(redis_url) as client:
        batch = client.submit([{"prompt": "a"}], notify=receiver.url)
        async with draining(redis_url, gateway_private_webhooks=True):
            await until(lambda: len(receiver.got) >= 1)
            await until(lambda: "delivered" in _status_of(batch.id, redis_url))


def _status_of(batch_id: str, redis_url: str) -> str:
    return run_producer("status", batch_id, redis_url=redis_url).stdout


def test_the_secret_is_printed_on_request_alone_and_what_is_no_url_is_refused(
    redis_url: str, tmp_path: Path
) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text('{"prompt": "a"}\n')
    words = ("submit", file, "--batch-id", "b", "--notify")
    done = run_producer(*words, "https://example.org/hook", redis_url=redis_url)
    assert done.returncode == 0, done.stderr
    with Client(redis_url) as client:
        assert client.webhook_secret not in done.stdout + done.stderr
        assert "`producer webhooks secret`" in done.stderr
        shown = run_producer("webhooks", "secret", redis_url=redis_url)
        assert shown.stdout == f"{client.webhook_secret}\n"
        printed = run_producer("webhooks", "secret", "--json", redis_url=redis_url).stdout
        assert json.loads(printed)["secret"] == client.webhook_secret
    for wrong in ("example.org", "ftp://a/b", "http://me:pw@a/b", "https://"):
        refused = run_producer("submit", file, "--notify", wrong, redis_url=redis_url)
        assert (refused.returncode, "notify: " in refused.stderr) == (2, True), wrong
