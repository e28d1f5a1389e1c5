"""Commands that change a batch: cancel, retry, delete, dead letters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import orjson
from kit.commands.support import (
    as_json,
    batch_file,
    finish,
    queued,
    run_all,
    run_producer,
    state,
)
from kit.protocol.lessee import Lessee, celery_message, client_of, submit_batch

from contract.errors import RequestFailed
from contract.index import IndexChunk
from contract.redis.batches import BatchStore


def test_a_queued_batch_is_cancelled_without_a_worker(redis_url: str, store: BatchStore):
    submit_batch(store, 3)

    done = run_producer("cancel", "b1", "--json", redis_url=redis_url)

    assert done.returncode == 0
    assert orjson.loads(done.stdout) == {"id": "b1", "requests": 3}
    batch = state(store, "b1")
    assert (batch.status, batch.number("cancelled")) == ("cancelled", 3)
    results = run_producer("results", "b1", redis_url=redis_url)
    assert results.returncode == 1
    assert [orjson.loads(x)["error"]["code"] for x in results.stdout.splitlines()] == [
        "cancelled"
    ] * 3


def test_a_cancel_that_comes_too_late_is_told(redis_url: str, store: BatchStore):
    submit_batch(store, 2)
    run_all(store)
    for args in (("b1",), ("b1", "--request", "c1")):
        done = run_producer("cancel", *args, redis_url=redis_url)
        assert done.returncode == 0
        assert "0 requests cancelled" in done.stderr
        assert "ended already" in done.stderr
    assert state(store, "b1").status == "completed"


def test_requests_that_workers_end_first_are_counted_as_cancelled(store: BatchStore):
    submitted = submit_batch(store, 1300)
    lessee = Lessee(client_of(store))

    class Overtaken(BatchStore):
        """A worker looks for requests after the batch was marked, and before they are walked."""

        def index(self, batch_id: str, start: int = 0) -> Iterator[IndexChunk]:
            while lessee.pop() or lessee.head[3]:
                pass
            return super().index(batch_id, start)

    overtaken = Overtaken(client_of(store), ttl_ms=60_000)
    assert overtaken.cancel(submitted.batch) == 1300
    assert overtaken.cancel(state(store, "b1")) == 0
    assert state(store, "b1").status == "cancelled"


def test_cancel_tells_queued_requests_from_those_in_flight(redis_url: str, store: BatchStore):
    submit_batch(store, 5)
    submit_batch(store, 2, batch_id="other")
    lessee = Lessee(client_of(store))
    lessee.pop(2)
    assert store.in_flight(state(store, "b1")) == 2
    assert store.in_flight(state(store, "other")) == 0
    told = run_producer("cancel", "b1", redis_url=redis_url).stderr
    assert told == "b1: 5 requests cancelled (3 queued, 2 in flight)\n"
    told = run_producer("cancel", "b1", redis_url=redis_url).stderr
    assert told == "b1: 0 requests cancelled: it has ended already (cancelled)\n"
    told = run_producer("cancel", "other", "--request", "c1", redis_url=redis_url).stderr
    assert told == "other: 1 request cancelled\n"


def test_one_request_is_cancelled_and_the_others_run(redis_url: str, store: BatchStore):
    submit_batch(store, 3)
    done = run_producer("cancel", "b1", "--request", "c2", redis_url=redis_url)
    assert done.returncode == 0
    run_all(store)
    batch = state(store, "b1")
    assert (batch.number("completed"), batch.number("cancelled")) == (2, 1)
    assert batch.status == "completed"


def test_failed_requests_are_retried_and_bad_lines_are_not(
    redis_url: str, store: BatchStore, tmp_path: Path
):
    path = batch_file(tmp_path / "in", 2)
    with path.open("ab") as file:
        file.write(b"{\n")
    run_producer("submit", path, "--batch-id", "b1", redis_url=redis_url)
    lessee = Lessee(client_of(store))
    finish(lessee, lessee.pop(), RequestFailed("no"))
    assert state(store, "b1").number("failed") == 3

    done = run_producer("retry", "b1", "--json", redis_url=redis_url)

    assert orjson.loads(done.stdout) == {"id": "b1", "requests": 2}
    assert len(queued(store)) == 2
    run_all(store)
    batch = state(store, "b1")
    assert (batch.number("completed"), batch.number("failed")) == (2, 1)


def test_cancelled_requests_are_retried_only_if_asked_for(redis_url: str, store: BatchStore):
    submit_batch(store, 2)
    run_producer("cancel", "b1", redis_url=redis_url)
    without = run_producer("retry", "b1", "--json", redis_url=redis_url)
    assert orjson.loads(without.stdout)["requests"] == 0
    with_them = run_producer("retry", "b1", "--include", "cancelled", "--json", redis_url=redis_url)
    assert orjson.loads(with_them.stdout)["requests"] == 2
    assert run_all(store) == 2
    assert state(store, "b1").status == "completed"


def test_an_unfinished_batch_is_deleted_only_by_force(redis_url: str, store: BatchStore):
    submitted = submit_batch(store, 2)
    lessee = Lessee(client_of(store))
    finish(lessee, lessee.pop()[:1])

    refused = run_producer("delete", "b1", redis_url=redis_url)
    assert refused.returncode == 2
    assert "--force cancels it first" in refused.stderr
    forced = run_producer("delete", "b1", "--force", "--json", redis_url=redis_url)
    assert orjson.loads(forced.stdout) == {"id": "b1", "object": "warmq.batch", "deleted": True}

    assert store.batch("b1") is None
    assert store.results(submitted.ids) == [None, None]
    assert list(client_of(store).scan_iter("warmq:batch:*")) == []


def test_dead_letters_are_listed_shown_and_queued_again(redis_url: str, store: BatchStore):
    client_of(store).lpush("warmq", b"garbage", celery_message("t1"))
    lessee = Lessee(client_of(store))
    (lease,) = lessee.pop()
    lessee.bury(lease, "poison")

    listed = as_json(run_producer("dead", "list", "--json", redis_url=redis_url))
    assert [letter["request_id"] for letter in listed] == [None, "t1"]
    assert all("message" not in letter for letter in listed)
    assert "poison" in run_producer("dead", "list", redis_url=redis_url).stdout
    shown = as_json(run_producer("dead", "show", listed[1]["id"], redis_url=redis_url))
    assert orjson.loads(shown["message"])["headers"]["id"] == "t1"

    retried = as_json(run_producer("dead", "retry", "--all", "--json", redis_url=redis_url))

    assert retried == {"requests": 1}  # garbage stays
    assert [message["headers"]["id"] for message in queued(store)] == ["t1"]
    left = as_json(run_producer("dead", "list", "--json", redis_url=redis_url))
    assert [letter["request_id"] for letter in left] == [None]
