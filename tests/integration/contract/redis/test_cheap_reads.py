"""What may be asked of Redis again and again: counted in round trips, and bounded in memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import orjson
import pytest
import redis
from kit.commands.support import run_producer
from kit.protocol.lessee import QUEUE, SEED, Lessee

from contract.redis import keys
from contract.redis.batches import BatchStore
from contract.redis.reads import PAGE

LETTERS = 3_000
#: All reasons together are 6 MB, all messages 30 MB.
REASON, MESSAGE = "r" * 2_000, b"m" * 10_000


@contextmanager
def round_trips(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """Collect what the block sends to Redis: each write waits for its answer."""
    sent: list[bytes] = []
    real = redis.Connection.send_packed_command

    def send(self: redis.Connection, command: list[bytes], check_health: bool = True) -> None:
        sent.append(b"".join(command))
        real(self, command, check_health)

    with monkeypatch.context() as patched:
        patched.setattr(redis.Connection, "send_packed_command", send)
        yield sent


def make_batches(redis_client: redis.Redis, store: BatchStore, count: int) -> list[str]:
    """Make empty batches; return their ids, newest first."""
    ids = [f"b{n}" for n in range(count)]
    for batch_id in ids:
        store.create(batch_id, SEED, {"queue": QUEUE, "model": f"of {batch_id}"})
    # Many were created within one millisecond.
    redis_client.zadd(keys.BATCHES, {batch_id: n for n, batch_id in enumerate(ids)})
    return ids[::-1]


def test_a_hundred_batches_are_listed_in_one_round_trip(
    redis_client: redis.Redis, store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = make_batches(redis_client, store, 100)
    assert len(store.batches()) == 100  # from now on Redis knows the script
    with round_trips(monkeypatch) as sent:
        found = store.batches()
    assert len(sent) == 1
    assert [batch.id for batch in found] == ids
    assert [batch.fields for batch in found] == [store.batch(b).fields for b in ids]  # type: ignore[union-attr]


def test_more_batches_than_a_page_are_listed_page_by_page_without_expired_ones(
    redis_client: redis.Redis, store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = make_batches(redis_client, store, 2 * PAGE + 1)
    for expired in (ids[3], ids[PAGE + 3]):
        redis_client.delete(keys.batch_key(expired))
        ids.remove(expired)
    store.batches()
    with round_trips(monkeypatch) as sent:
        found = store.batches()
    assert len(sent) == 3
    assert [(batch.id, batch.fields["model"]) for batch in found] == [(b, f"of {b}") for b in ids]


def test_every_other_cheap_read_is_one_round_trip(
    redis_client: redis.Redis, store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = make_batches(redis_client, store, 3)
    Lessee(redis_client).sweep()  # a worker announces itself
    with round_trips(monkeypatch) as sent:
        assert store.batch(ids[0]) is not None
        assert store.existing([*ids, "none"]) == ids
        assert store.expires_in_s(ids[0]) is None
        assert len(store.workers(QUEUE)) == 1
    assert len(sent) == 4


@pytest.fixture
def letters(redis_client: redis.Redis) -> list[str]:
    """Many dead letters with long reasons and large messages; their ids, oldest first."""
    ids = [str(n) for n in range(8, 8 + LETTERS)]
    for start in range(0, LETTERS, 500):
        pipe = redis_client.pipeline(transaction=False)
        for letter_id in ids[start : start + 500]:
            fields = ("1", str(len(MESSAGE)), QUEUE, f"r{letter_id}", "", "", "null", REASON)
            pipe.hset(keys.DEAD, letter_id, "\0".join(fields))
            pipe.lpush(keys.dead_key(letter_id), MESSAGE)
        pipe.execute()
    return ids


def test_dead_letters_are_read_page_by_page_and_without_their_messages(
    redis_client: redis.Redis, store: BatchStore, letters: list[str]
) -> None:
    redis_client.config_resetstat()
    tracemalloc.start()
    try:
        found = [letter["id"] for letter in store.dead_letters()]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found == letters
    assert peak < 5_000_000  # of 6 MB of reasons: pages of 1 MB, and the ids
    sent = redis_client.info("stats")["total_net_output_bytes"]
    assert sent < 2.5 * LETTERS * len(REASON)  # twice: the ids come with their records
    assert "cmdstat_lindex" not in redis_client.info("commandstats")


def test_named_dead_letters_are_asked_for_alone(
    redis_client: redis.Redis, store: BatchStore, letters: list[str]
) -> None:
    redis_client.config_resetstat()
    wanted = [letters[-1], "none", letters[0]]
    assert [letter["id"] for letter in store.dead_letters(wanted)] == [letters[0], letters[-1]]
    assert redis_client.info("stats")["total_net_output_bytes"] < 20_000


def test_a_letter_of_the_first_release_is_listed_and_deleted_and_hides_no_other(
    redis_client: redis.Redis, store: BatchStore
) -> None:
    redis_client.hset(keys.DEAD, "1", f"why\x001700000000000\0{QUEUE}\0{{}}")
    redis_client.hset(keys.DEAD, "2", "\0".join(("1", "2", QUEUE, "r", "", "", "null", REASON)))
    redis_client.lpush(keys.dead_key("2"), MESSAGE)
    first, second = store.dead_letters()
    assert (first["at"], first["list"], first["request_id"]) == (1700000000000, QUEUE, None)
    assert "0.1.0" in first["reason"]
    assert second["request_id"] == "r"
    assert store.retry_dead() == 1
    assert [letter["id"] for letter in store.dead_letters()] == ["1"]
    assert store.delete_dead(["1"]) == 1


def test_all_dead_letters_are_listed_retried_and_deleted(
    redis_url: str, redis_client: redis.Redis, letters: list[str]
) -> None:
    shown = run_producer("dead", "list", "--json", redis_url=redis_url).stdout
    assert [letter["id"] for letter in orjson.loads(shown)] == letters
    rows = run_producer("dead", "list", redis_url=redis_url).stdout.splitlines()
    assert [row.split()[0] for row in rows] == ["ID", *letters]
    for command, count, waiting in (("retry", LETTERS, LETTERS), ("delete", 0, LETTERS)):
        done = run_producer("dead", command, "--all", "--json", redis_url=redis_url)
        assert orjson.loads(done.stdout) == {"requests": count}
        assert redis_client.llen(QUEUE) == waiting
    assert run_producer("dead", "list", "--json", redis_url=redis_url).stdout == "[]\n"
