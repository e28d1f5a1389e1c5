"""The previous release's `producer` at what this release has queued: it does what it always did."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.commands.support import batch_file, finish, run_producer
from kit.protocol.lessee import Lessee, client_of, counts, now, submit_batch
from kit.protocol.snapshot import Snapshot
from kit.stacks.previous import Previous

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


def held(store: BatchStore) -> dict[bytes, object]:
    """Return all that Redis holds."""
    return Snapshot.take(client_of(store), texts=True).held


@pytest.mark.parametrize("command", [
    ["list"], ["status", "waits"], ["results", "failed", "-o", "-"], ["watch", "failed"],
    ["dead", "list"],
])  # fmt: skip
def test_it_reads_the_batches_of_this_release_and_changes_nothing(
    previous: Previous, server: RedisServer, store: BatchStore, command: list[str]
) -> None:
    before = held(store)
    done = previous.producer(*command, redis_url=server.url)
    assert done.returncode in (0, 1), done.stderr  # 1: some of the requests have failed
    client_of(store).hdel("warmq:batch:failed", "collected_at")  # `results` notes when it was
    assert held(store) == before


@pytest.mark.parametrize("outcome", ["failed", "cancelled"])
def test_its_retry_queues_what_this_release_has_ended(
    previous: Previous, server: RedisServer, store: BatchStore, outcome: str
) -> None:
    done = previous.producer("retry", outcome, "--include", "cancelled", redis_url=server.url)
    assert done.returncode == 0, done.stderr
    assert counts(now(store, outcome)) == {}
    assert len(Lessee(client_of(store)).pop()) == 4  # with those of the batch that waits


def test_its_dead_retry_queues_the_letters_of_this_release(
    previous: Previous, server: RedisServer, store: BatchStore
) -> None:
    worker = Lessee(client_of(store))
    worker.bury(worker.pop(k=1)[0], "poison: the engine died")
    done = previous.producer("dead", "retry", "--all", redis_url=server.url)
    assert done.returncode == 0, done.stderr
    assert not list(store.dead_letters())
    assert len(worker.pop()) == 2


def test_its_delete_leaves_nothing_of_a_batch_of_this_release(
    previous: Previous, server: RedisServer, store: BatchStore
) -> None:
    assert previous.producer("delete", "failed", redis_url=server.url).returncode == 0
    assert store.batch("failed") is None
    assert not client_of(store).keys("*batch:failed*")


def test_its_submit_goes_on_with_a_batch_of_this_release(
    previous: Previous, server: RedisServer, store: BatchStore, tmp_path: Path
) -> None:
    file = batch_file(tmp_path / "in.jsonl", 700)
    assert run_producer("submit", file, "--batch-id", "b", redis_url=server.url).returncode == 0
    client_of(store).hdel("warmq:batch:b", "sealed")  # as if that submit had been interrupted
    done = previous.producer("submit", file, "--batch-id", "b", redis_url=server.url)
    assert done.returncode == 0, done.stderr
    assert now(store, "b").sealed
    assert now(store, "b").number("total") == 700


def test_its_cancel_ends_a_batch_of_this_release(
    previous: Previous, server: RedisServer, store: BatchStore
) -> None:
    assert previous.producer("cancel", "waits", redis_url=server.url).returncode == 0
    assert counts(now(store, "waits")) == {"cancelled": 2}
    assert Lessee(client_of(store)).pop() == []
