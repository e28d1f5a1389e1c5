"""Upgrades: what protocol 1 left in Redis is served, and what does not fit is refused in words.

The states are those of tests/kit/stacks/protocol_1.py: recorded ones, and, where the history is
there, as the old commit's own code makes them now.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis
from kit.commands.support import batch_file, run_producer, write_lines
from kit.drain.draining import draining, soon
from kit.protocol.lessee import (
    QUEUE,
    Lessee,
    celery_message,
    client_of,
    counts,
    now,
    queued_ids,
    stored,
    submit_batch,
)
from kit.stacks import protocol_1
from kit.stacks.older_worker import announce

from contract.errors import ProtocolMismatch
from contract.redis import keys
from contract.redis.batches import BatchStore
from contract.redis.scripts import source
from contract.version import PROTOCOL
from demo.stack import ROOT
from worker.drain.retiring import retire_some


def history_is_there() -> bool:
    """Whether the old commit can be checked out: not in a release's archive or a shallow clone."""
    look = ["git", "cat-file", "-e", f"{protocol_1.REVISION}^{{commit}}"]
    return subprocess.run(look, cwd=ROOT, capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="session")
def made_now() -> dict[str, list[Any]]:
    """Return what the old commit's code leaves today."""
    return protocol_1.recording()


@pytest.fixture(params=["recorded", "made now"])
def old(request: pytest.FixtureRequest, redis_client: redis.Redis) -> None:
    """Fill Redis with what protocol 1 leaves."""
    if request.param == "recorded":
        protocol_1.restore(redis_client, orjson.loads(protocol_1.RECORDED.read_bytes()))
        return
    if not history_is_there():
        pytest.skip(f"commit {protocol_1.REVISION} is not in this checkout")
    protocol_1.restore(redis_client, request.getfixturevalue("made_now"))


async def serve(redis_url: str, store: BatchStore, batches: Sequence[str]) -> None:
    """Run a worker until the batches have ended."""
    Lessee(client_of(store)).allow_sweep()
    async with draining(redis_url) as running:
        await soon(lambda: all(now(store, name).terminal == now(store, name).number("total")
                               for name in batches))  # fmt: skip
        await soon(lambda: not running.drain.in_flight)


# -- what protocol 1 left ----------------------------------------------------------------------


async def test_what_waits_and_what_a_dead_worker_held_is_answered(
    old: None, redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    assert store.in_flight(now(store, "leased")) == 3
    await serve(redis_url, store, ["queued", "leased", "open"])
    for name, count in (("queued", 3), ("leased", 3)):
        assert (now(store, name).status, counts(now(store, name))) == (
            "completed",
            {"completed": count},
        )
        out = tmp_path / f"{name}.jsonl"
        assert run_producer("results", name, "-o", out, redis_url=redis_url).returncode == 0
        lines = [orjson.loads(line) for line in out.read_bytes().splitlines()]
        assert [line["custom_id"] for line in lines] == [f"{name}-{i}" for i in range(count)]
    # Of the one whose submit was interrupted, what was queued is answered; it stays open
    assert (now(store, "open").status, counts(now(store, "open"))) == (
        "validating",
        {"completed": 2},
    )
    assert store.queue_lengths("warmq") == dict.fromkeys(store.queue_lengths("warmq"), 0)
    assert client_of(store).zcard(keys.LEASES) == 0


async def test_a_retry_runs_what_had_failed_expired_or_was_cancelled(
    old: None, redis_url: str, store: BatchStore
) -> None:
    for name, count in (("failed", 2), ("expired", 1), ("cancelled", 2)):
        batch = now(store, name)
        assert store.retry(batch, ["failed", "cancelled", "expired"]) == count, name
        assert store.retry(now(store, name), ["failed", "cancelled", "expired"]) == 0, name
    await serve(redis_url, store, ["failed", "expired", "cancelled"])
    assert counts(now(store, "failed")) == {"completed": 2}
    assert counts(now(store, "expired")) == {"completed": 1}
    assert counts(now(store, "cancelled")) == {"completed": 3}


async def test_what_was_cancelled_is_kept_for_a_retry_after_a_worker_has_met_it(
    old: None, redis_url: str, store: BatchStore
) -> None:
    await serve(redis_url, store, ["queued"])
    assert counts(now(store, "cancelled")) == {"completed": 1, "cancelled": 2}
    assert store.retry(now(store, "cancelled"), ["cancelled"]) == 2
    await serve(redis_url, store, ["cancelled"])
    assert counts(now(store, "cancelled")) == {"completed": 3}


async def test_a_dead_letter_is_told_shown_and_run_again(
    old: None, redis_url: str, store: BatchStore
) -> None:
    sweeper = Lessee(client_of(store))
    sweeper.ttl_ms = 10**13  # the recorded letter of no batch is old, and would be forgotten
    sweeper.sweep()
    poison, garbage = store.dead_letters()
    assert (poison["custom_id"], poison["batch_id"]) == ("poison-0", "poison")
    assert poison["reason"] == "poison: the engine died"
    assert (garbage["reason"], garbage["request_id"]) == ("not a JSON object", None)
    assert store.dead_message(garbage["id"]) == b"garbage"
    shown = run_producer("dead", "show", poison["id"], redis_url=redis_url)
    assert '"custom_id"' in shown.stdout, shown
    assert store.retry_dead() == 1
    await serve(redis_url, store, ["poison"])
    assert counts(now(store, "poison")) == {"completed": 1}
    assert poison["id"] not in [letter["id"] for letter in store.dead_letters()]


def test_every_command_reads_batches_of_protocol_1(
    old: None, redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    listed = run_producer("list", redis_url=redis_url)
    assert listed.returncode == 0, listed.stderr
    for name in (
        "complete",
        "failed",
        "poison",
        "leased",
        "cancelled",
        "expired",
        "queued",
        "open",
    ):
        assert name in listed.stdout
        assert run_producer("status", name, redis_url=redis_url).returncode == 0
    out = run_producer("results", "complete", "-o", "-", redis_url=redis_url).stdout
    assert out.count("an old answer") == 2
    assert run_producer("watch", "complete", redis_url=redis_url).returncode == 0
    assert run_producer("cancel", "queued", redis_url=redis_url).returncode == 0
    assert counts(now(store, "queued")) == {"cancelled": 3}
    assert run_producer("delete", "complete", redis_url=redis_url).returncode == 0
    assert store.batch("complete") is None
    assert run_producer("delete", "leased", "--force", redis_url=redis_url).returncode == 0
    assert not client_of(store).keys("warmq:batch:leased*")


async def test_a_finished_batch_gets_its_expiry(
    old: None, redis_url: str, store: BatchStore, redis_client: redis.Redis
) -> None:
    async with draining(redis_url, side_tasks=False) as running:
        Lessee(redis_client).sweep()  # it takes over what protocol 1 had to retire
        assert await retire_some(running.leases) >= 2
    assert redis_client.pttl(keys.batch_key("complete")) > 0


def test_submitting_again_is_refused_in_words(
    old: None, redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    file = batch_file(tmp_path / "open.jsonl", 2)
    refused = run_producer("submit", file, "--batch-id", "open", redis_url=redis_url)
    assert refused.returncode == 2
    assert "was queued by an older warmq, which cut files into other chunks" in refused.stderr
    assert "use another --batch-id" in refused.stderr
    assert now(store, "open").number("total") == 2


def test_a_delete_that_was_cut_short_is_finished_before_its_name_is_used_again(
    redis_client: redis.Redis, store: BatchStore
) -> None:
    # Given what f5e998d's first step of a delete leaves
    first = submit_batch(store, 2)
    redis_client.set(keys.result_key(first.ids[0]), b"old")
    redis_client.delete(keys.batch_key("b1"))
    redis_client.zrem(keys.BATCHES, "b1")
    submit_batch(store, 1)
    assert len(list(store.index("b1"))) == 1
    assert stored(redis_client, first.ids[0]) is None


def test_a_message_without_a_life_is_of_no_batch_that_has_one(
    redis_client: redis.Redis, store: BatchStore
) -> None:
    batch = submit_batch(store, 1).batch
    redis_client.delete("warmq", *redis_client.keys("warmq\x06*"))
    forged = {"batch": "b1", "created": batch.created, "custom_id": "c1", "line": 1, "v": 1}
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
    assert "nothing was queued: all workers of queue warmq are older" in refused.stderr
    assert "celery@a.12.0a (warmq 0.1.0, protocol 1); upgrade the workers" in refused.stderr
    assert store.batches() == []
    assert sum(store.queue_lengths("warmq").values()) == 0


def test_who_submits_is_warned_of_older_workers_beside_new_ones(
    redis_client: redis.Redis, redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    file = batch_file(tmp_path / "in.jsonl", 2)
    announce(redis_client, "celery@a.12.0a")
    announce(redis_client, "celery@b.13.0b", protocol=PROTOCOL)
    submitted = run_producer("submit", file, redis_url=redis_url)
    assert submitted.returncode == 0
    assert "some workers of queue warmq are older than this producer" in submitted.stderr
    assert "celery@a.12.0a" in submitted.stderr
    assert "celery@b.13.0b" not in submitted.stderr


@pytest.mark.parametrize("command", ["submit", "run"])
def test_once_is_refused_while_any_older_worker_lives(
    command: str, redis_client: redis.Redis, redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    """It would end a request that an engine died with, and not those that wait for its answer."""
    file = batch_file(tmp_path / "in.jsonl", 2)
    announce(redis_client, "celery@a.12.0a")
    announce(redis_client, "celery@b.13.0b", protocol=PROTOCOL)
    more = [tmp_path / "out.jsonl"] if command == "run" else []
    refused = run_producer(command, file, *more, "--once", redis_url=redis_url)
    assert refused.returncode == 2
    assert "with once, all workers of queue warmq must speak this producer's" in refused.stderr
    assert "celery@a.12.0a (warmq 0.1.0, protocol 1); upgrade them, or leave once" in refused.stderr
    assert store.batches() == []


async def test_a_worker_announces_its_protocol(redis_url: str, store: BatchStore) -> None:
    async with draining(redis_url):
        (worker,) = await soon(lambda: store.workers("warmq"))
    assert worker["protocol"] == PROTOCOL


def test_the_doctor_names_workers_of_another_protocol(
    redis_client: redis.Redis, redis_url: str
) -> None:
    announce(redis_client, "celery@a.12.0a")
    announce(redis_client, "celery@b.13.0b", protocol=PROTOCOL + 1)
    told = run_producer("doctor", redis_url=redis_url)
    assert told.returncode == 1
    assert f"celery@a.12.0a speaks protocol 1, this producer {PROTOCOL}" in told.stdout
    assert f"celery@b.13.0b speaks protocol {PROTOCOL + 1}, this producer" in told.stdout


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
    before = protocol_1.snapshot(redis_client)
    refused = run_producer(command, "b1", redis_url=redis_url)
    assert refused.returncode == 2
    assert f"was queued by a newer warmq (protocol {PROTOCOL + 1};" in refused.stderr
    assert "upgrade this one" in refused.stderr
    assert protocol_1.snapshot(redis_client) == before


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
    assert redis_client.lrange(submitted.list_key, 0, -1) == [later]


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


def test_more_leases_of_a_dead_older_worker_than_a_sweep_hands_back_all_return(
    redis_client: redis.Redis,
) -> None:
    lessee, dead = Lessee(redis_client), "w1@host.7.abc"
    names = [f"r{n}" for n in range(20)]
    for number, name in enumerate(names, 1):
        lease = f"{dead}/{number}"
        record = b"2\0%s\0%s" % (QUEUE.encode(), celery_message(name))
        redis_client.hset(keys.older_worker_key(dead), lease, record)
        redis_client.zadd(keys.OLDER_LEASES, {lease: 1})
    lessee.allow_sweep()
    while lessee.sweep(limit=5):
        pass
    assert sorted(queued_ids(redis_client, QUEUE)) == sorted(names)
    assert not redis_client.keys("warmq:leased:*")
