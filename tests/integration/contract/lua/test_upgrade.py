"""Versions in one Redis: what does not fit is refused in words, what is not known is kept."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import redis
from kit.commands.support import batch_file, run_producer, write_lines
from kit.drain.draining import draining, soon
from kit.protocol.lessee import (
    QUEUE,
    Lessee,
    Submitted,
    celery_message,
    now,
    stored,
    submit_batch,
)
from kit.protocol.snapshot import Snapshot
from kit.stacks.older_worker import announce

from contract.errors import ProtocolMismatch
from contract.redis import keys
from contract.redis.batches import BatchStore
from contract.redis.scripts import source
from contract.version import PROTOCOL
from worker.drain.sweeper import retire_some

ANCIENT = "was queued by warmq 0.1.0 (protocol 1), which this one"


@pytest.fixture
def ancient(redis_client: redis.Redis, store: BatchStore) -> Submitted:
    """Queue a batch as 0.1.0 did: neither it nor its messages have a life."""
    submitted = submit_batch(store, 2)
    redis_client.hdel(keys.batch_key("b1"), "life", "v", "list")
    written = redis_client.lrange(submitted.list_key, 0, -1)
    redis_client.delete(submitted.list_key)
    life = b'"life":"%s",' % submitted.batch.life.encode()
    redis_client.rpush(QUEUE, *(message.replace(life, b"") for message in written))
    return submitted


# -- what 0.1.0 left ---------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["status", "results", "cancel", "retry", "delete", "watch"])
def test_a_batch_of_0_1_0_is_refused_in_words(
    ancient: Submitted, command: str, redis_client: redis.Redis, redis_url: str
) -> None:
    before = Snapshot.take(redis_client, texts=True).held
    refused = run_producer(command, "b1", redis_url=redis_url)
    assert refused.returncode == 2
    assert ANCIENT in refused.stderr
    assert "finish, collect or delete it with 0.2.0" in refused.stderr
    assert Snapshot.take(redis_client, texts=True).held == before


def test_submitting_to_a_batch_of_0_1_0_is_refused(
    ancient: Submitted, redis_url: str, tmp_path: Path
) -> None:
    file = batch_file(tmp_path / "in.jsonl", 2)
    refused = run_producer("submit", file, "--batch-id", "b1", redis_url=redis_url)
    assert refused.returncode == 2
    assert ANCIENT in refused.stderr


def test_messages_of_0_1_0_are_dead_letters_that_say_so(
    ancient: Submitted, redis_client: redis.Redis, store: BatchStore
) -> None:
    assert Lessee(redis_client).pop() == []
    letters = list(store.dead_letters())
    assert [letter["request_id"] for letter in letters] == ancient.ids
    assert {letter["reason"] for letter in letters} == {
        "queued by warmq 0.1.0 (protocol 1), which this worker does not read: submit it again"
    }
    assert [stored(redis_client, rid) for rid in ancient.ids] == [None, None]


async def test_a_finished_batch_of_0_1_0_keeps_no_other_from_its_expiry(
    redis_url: str, store: BatchStore, redis_client: redis.Redis
) -> None:
    for name in ("b1", "b2"):
        submit_batch(store, 1, batch_id=name)
        store.cancel(now(store, name))
    redis_client.hdel(keys.batch_key("b1"), "life")
    async with draining(redis_url, side_tasks=False) as running:
        assert await retire_some(running.leases) == 1
    assert redis_client.pttl(keys.batch_key("b2")) > 0
    assert redis_client.zcard(keys.RETIRING) == 0


def test_a_message_without_a_life_is_of_no_batch_that_has_one(
    redis_client: redis.Redis, store: BatchStore
) -> None:
    submit_batch(store, 1)
    redis_client.delete("warmq", *redis_client.keys("warmq\x06*"))
    forged = {"batch": "b1", "custom_id": "c1", "line": 1, "v": 1}
    redis_client.lpush("warmq", celery_message("x", warmq=forged))
    assert Lessee(redis_client).pop() == []
    assert store.queue_lengths("warmq")["warmq"] == 0


# -- the other way round -----------------------------------------------------------------------


@pytest.mark.parametrize("command", ["submit", "run"])
def test_nothing_is_queued_for_workers_that_are_all_older(
    command: str, redis_client: redis.Redis, redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    file = batch_file(tmp_path / "in.jsonl", 2)
    announce(redis_client, "celery@a.12.0a")
    more = [tmp_path / "out.jsonl"] if command == "run" else []
    refused = run_producer(command, file, *more, redis_url=redis_url)
    assert refused.returncode == 2
    assert "nothing was queued: workers of queue warmq are older" in refused.stderr
    assert "celery@a.12.0a (warmq 0.1.0, protocol 1); upgrade the workers" in refused.stderr
    assert store.batches() == []
    assert sum(store.queue_lengths("warmq").values()) == 0


@pytest.mark.parametrize("options", [(), ("--dedupe",)])
def test_nothing_is_queued_while_any_of_a_queues_workers_is_older(
    options: tuple[str, ...], redis_client: redis.Redis, redis_url: str, store: BatchStore,
    tmp_path: Path,
) -> None:  # fmt: skip
    file = batch_file(tmp_path / "in.jsonl", 2)
    announce(redis_client, "celery@a.12.0a")
    announce(redis_client, "celery@b.13.0b", protocol=PROTOCOL)
    refused = run_producer("submit", file, *options, redis_url=redis_url)
    assert refused.returncode == 2
    assert "celery@a.12.0a" in refused.stderr
    assert "celery@b.13.0b" not in refused.stderr
    assert store.batches() == []


async def test_a_worker_announces_its_protocol(redis_url: str, store: BatchStore) -> None:
    async with draining(redis_url):
        (worker,) = await soon(lambda: store.workers("warmq"))
    assert worker["protocol"] == PROTOCOL


def test_the_doctor_names_workers_of_another_protocol(
    redis_client: redis.Redis, redis_url: str
) -> None:
    announce(redis_client, "celery@a.12.0a", ahead_s=14)
    announce(redis_client, "celery@b.13.0b", ahead_s=14, protocol=PROTOCOL + 1)
    told = run_producer("doctor", redis_url=redis_url)
    assert told.returncode == 1
    assert f"celery@a.12.0a has protocol 1, this producer has {PROTOCOL}" in told.stdout
    assert f"celery@b.13.0b has protocol {PROTOCOL + 1}, this producer" in told.stdout


# -- what is newer than this -------------------------------------------------------------------


def test_a_batch_carries_the_protocol_that_both_languages_name(store: BatchStore) -> None:
    assert submit_batch(store, 1).batch.protocol == PROTOCOL
    assert f"local PROTOCOL = {PROTOCOL}\n" in source("create")


@pytest.mark.parametrize("command", ["status", "results", "cancel", "retry", "delete", "watch"])
def test_a_batch_of_a_newer_protocol_is_refused_in_words(
    command: str, redis_client: redis.Redis, redis_url: str, store: BatchStore
) -> None:
    submit_batch(store, 1)
    redis_client.hset(keys.batch_key("b1"), "v", PROTOCOL + 1)
    before = Snapshot.take(redis_client, texts=True).held
    refused = run_producer(command, "b1", redis_url=redis_url)
    assert refused.returncode == 2
    assert f"was queued by a newer warmq (protocol {PROTOCOL + 1};" in refused.stderr
    assert "upgrade this one" in refused.stderr
    assert Snapshot.take(redis_client, texts=True).held == before


def test_submitting_to_a_batch_of_a_newer_protocol_is_refused(
    redis_client: redis.Redis, redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    submit_batch(store, 1)
    redis_client.hset(keys.batch_key("b1"), "v", PROTOCOL + 1)
    file = write_lines(tmp_path / "in.jsonl", [])
    refused = run_producer("submit", file, "--batch-id", "b1", redis_url=redis_url)
    assert refused.returncode == 2
    assert "was queued by a newer warmq" in refused.stderr
    with pytest.raises(ProtocolMismatch):
        store.batch("b1")


def test_a_message_of_a_newer_protocol_is_a_dead_letter_that_can_be_run_later(
    redis_client: redis.Redis, store: BatchStore
) -> None:
    submit_batch(store, 1)
    (key,) = redis_client.keys("warmq\x06*")
    written = redis_client.lindex(key, 0)
    redis_client.lset(key, 0, written.replace(b'"v":1}', b'"v":%d}' % (PROTOCOL + 1)))
    worker = Lessee(redis_client)
    assert worker.pop() == []
    (letter,) = store.dead_letters()
    assert f"queued by a newer warmq (protocol {PROTOCOL + 1}, this worker" in letter["reason"]
    assert (letter["batch_id"], letter["custom_id"]) == ("b1", "c1")
    # Nothing has ended: it waits for a worker that knows it
    assert now(store).status == "in_progress"
    assert store.retry_dead() == 1
    assert redis_client.llen(letter["list"]) == 1


# -- what this one does not know ---------------------------------------------------------------


def test_a_messages_unknown_fields_survive_a_hand_back_and_a_retry(
    redis_client: redis.Redis, store: BatchStore
) -> None:
    submitted = submit_batch(store, 1)
    (written,) = redis_client.lrange(submitted.list_key, 0, -1)
    later = written.replace(b'"v":1}', b'"later":{"a":[],"b":12345678901234567890},"v":2}')
    later = later.replace(b'"properties":{', b'"properties":{"later":[],')
    redis_client.lset(submitted.list_key, 0, later)
    worker = Lessee(redis_client)
    (lease,) = worker.pop()
    worker.release(lease)
    assert redis_client.lrange(submitted.list_key, 0, -1) == [later]
    (lease,) = worker.pop()
    worker.expire_leases(lease)
    worker.allow_sweep()
    worker.sweep()
    (lease,) = worker.pop()
    worker.done(lease, outcome="failed", keep=True)
    assert store.retry(now(store), ["failed"]) == 1
    (again,) = redis_client.lrange(submitted.list_key, 0, -1)
    created = rb'"created":"\d+"'  # RETRY notes its own time there
    assert re.sub(created, b"", again) == re.sub(created, b"", later)


def test_a_batchs_unknown_fields_survive_all_that_is_done_to_it(
    redis_client: redis.Redis, store: BatchStore
) -> None:
    submit_batch(store, 2)
    redis_client.hset(keys.batch_key("b1"), "later", "kept")
    worker = Lessee(redis_client)
    for lease in worker.pop():
        worker.done(lease, outcome="failed", keep=True)
    assert store.retry(now(store), ["failed"]) == 2
    store.cancel(now(store))
    assert now(store).finished
    assert now(store).fields["later"] == "kept"


def test_an_announcements_unknown_fields_harm_no_reader(
    redis_client: redis.Redis, redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    announce(redis_client, "celery@b.13.0b", protocol=PROTOCOL, later={"a": [1]})
    file = batch_file(tmp_path / "in.jsonl", 2)
    assert run_producer("submit", file, "--batch-id", "b", redis_url=redis_url).returncode == 0
    for command in (["plan", file], ["status", "b"], ["doctor"]):
        done = run_producer(*command, redis_url=redis_url)
        assert done.returncode in (0, 1), done.stderr
        assert "Traceback" not in done.stderr
