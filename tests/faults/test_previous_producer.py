"""The previous release's `producer` at what this release has queued: it reads, or is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis
from kit.commands.support import batch_file, finish, run_producer
from kit.protocol.lessee import Lessee, client_of, counts, now, submit_batch
from kit.stacks.previous import Previous
from kit.stacks.protocol_1 import snapshot

from contract.errors import RequestFailed
from contract.redis.batches import BatchStore
from demo.stack import RedisServer


@pytest.fixture
def store(server: RedisServer) -> BatchStore:
    """Return a store with a batch that has failed, a cancelled one and one that waits."""
    store = BatchStore(server.client(), ttl_ms=600_000)
    worker = Lessee(client_of(store))
    submit_batch(store, 2, batch_id="failed")
    finish(worker, worker.pop(k=2), error=RequestFailed("the attempt failed"))
    submit_batch(store, 2, batch_id="cancelled")
    store.cancel(now(store, "cancelled"))
    assert worker.pop(k=2) == []  # it keeps them for a retry
    submit_batch(store, 2, batch_id="waits")
    return store


def held(client: redis.Redis) -> dict[str, object]:
    """Return all that Redis holds."""
    return dict(snapshot(client))


@pytest.mark.parametrize("command", [
    ["list"], ["status", "waits"], ["results", "failed", "-o", "-"], ["watch", "failed"],
    ["dead", "list"],
])  # fmt: skip
def test_it_reads_the_batches_of_this_release_and_changes_nothing(
    previous: Previous, server: RedisServer, store: BatchStore, command: list[str]
) -> None:
    before = held(client_of(store))
    done = previous.producer(*command, redis_url=server.url)
    assert done.returncode in (0, 1), done.stderr  # 1: some of the requests have failed
    assert held(client_of(store)) == before


@pytest.mark.parametrize("outcome", ["failed", "cancelled"])
def test_its_retry_is_refused_before_it_changes_anything(
    previous: Previous, server: RedisServer, store: BatchStore, outcome: str
) -> None:
    before = held(client_of(store))
    refused = previous.producer(
        "retry", outcome, "--include", "cancelled", redis_url=server.url
    )  # fmt: skip
    assert refused.returncode == 3
    assert "WRONGTYPE" in refused.stderr
    assert held(client_of(store)) == before
    # this release's retry runs them
    assert store.retry(now(store, outcome), [outcome]) == 2
    assert counts(now(store, outcome)) == {}


def test_its_dead_retry_leaves_the_letters_of_this_release_alone(
    previous: Previous, server: RedisServer, store: BatchStore
) -> None:
    worker = Lessee(client_of(store))
    worker.bury(worker.pop(k=1)[0], "poison: the engine died")
    before = held(client_of(store))
    done = previous.producer("dead", "retry", "--all", redis_url=server.url)
    assert done.returncode == 0, done.stderr
    assert held(client_of(store)) == before
    assert store.retry_dead() == 1


def test_its_delete_leaves_no_batch_of_this_release(
    previous: Previous, server: RedisServer, store: BatchStore
) -> None:
    assert previous.producer("delete", "failed", redis_url=server.url).returncode == 0
    assert store.batch("failed") is None
    (left,) = {key.rpartition(b":")[0] for key in client_of(store).keys("*batch:failed*")}
    assert left == b"warmq:batch:failed:kept"


def test_its_submit_to_a_batch_of_this_release_is_refused_in_words(
    previous: Previous, server: RedisServer, store: BatchStore, tmp_path: Path
) -> None:
    file = batch_file(tmp_path / "in.jsonl", 700)
    assert run_producer("submit", file, "--batch-id", "b", redis_url=server.url).returncode == 0
    client_of(store).hdel("warmq:batch:b", "sealed")  # as if that submit had been interrupted
    before = held(client_of(store))
    refused = previous.producer("submit", file, "--batch-id", "b", redis_url=server.url)
    assert refused.returncode == 2
    assert "use another --batch-id" in refused.stderr
    assert held(client_of(store)) == before


def test_its_cancel_ends_a_batch_of_this_release(
    previous: Previous, server: RedisServer, store: BatchStore
) -> None:
    assert previous.producer("cancel", "waits", redis_url=server.url).returncode == 0
    assert counts(now(store, "waits")) == {"cancelled": 2}
    assert Lessee(client_of(store)).pop() == []
