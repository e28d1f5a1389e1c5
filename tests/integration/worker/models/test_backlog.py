"""What a worker of several models reads in Redis, and the claims of swaps."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import orjson
import pytest
import redis
from kit.protocol.lessee import Lessee, celery_message, submit_batch
from kit.protocol.script_keys import kept_key
from kit.verdicts.settled import leftovers

from contract import naming
from contract.redis import keys
from contract.redis.batches import BatchStore
from contract.redis.tenants import Tenant
from demo.stack import RedisServer
from worker.models.backlog import BacklogReads
from worker.models.policy import Stay, Terms, choose

QUEUES = {"a": "warmq.a", "b": "warmq.b"}


@pytest.fixture
def reads(redis_client: redis.Redis) -> BacklogReads:
    return BacklogReads(redis_client)


def test_a_batch_waits_since_its_creation_or_since_a_worker_left_it(
    reads: BacklogReads, store: BatchStore, redis_client: redis.Redis
) -> None:
    batch = submit_batch(store, 7, batch_id="b1", queue="warmq.b").batch
    redis_client.hset(keys.batch_key("b1"), "created_at", int(batch.created) - 90_000)
    found = reads.backlog(QUEUES, "w1", {})
    assert found.demands["a"].requests == 0 and found.demands["b"].requests == 7
    assert found.demands["b"].tokens > 0 and found.demands["b"].online_s is None
    assert 90 <= found.demands["b"].oldest_s < 120
    reads.note_left(["warmq.b"])
    assert reads.backlog(QUEUES, "w1", {}).demands["b"].oldest_s < 30


@pytest.mark.parametrize("priority", [0, 6])
def test_requests_without_a_batch_wait_since_they_were_first_seen(
    reads: BacklogReads, store: BatchStore, redis_client: redis.Redis, priority: int
) -> None:
    submitted = submit_batch(store, 1, queue="warmq.a", priority=priority, fifo=True)
    first = reads.backlog(QUEUES, "w1", {}).demands["a"]
    then = reads.backlog(QUEUES, "w1", {}).demands["a"]
    assert 0 <= first.oldest_s < then.oldest_s
    assert (then.online_s is not None) == (priority == 0)
    redis_client.delete(submitted.list_key, naming.turns_key("warmq.a"))
    assert reads.backlog(QUEUES, "w1", {}).demands["a"].requests == 0


def test_a_deadline_leaves_the_time_that_the_work_needs(
    reads: BacklogReads, store: BatchStore, redis_client: redis.Redis
) -> None:
    submit_batch(store, 10, batch_id="b1", queue="warmq.b")
    redis_client.hset(keys.batch_key("b1"), "deadline", reads.now_ms() + 100_000)
    free = reads.backlog(QUEUES, "w1", {}).demands["b"]
    busy = reads.backlog(QUEUES, "w1", {"b": free.tokens / 60}).demands["b"]
    assert 90 < free.slack_s <= 100
    assert 30 < busy.slack_s <= 40
    assert reads.backlog(QUEUES, "w1", {}).demands["a"].slack_s == math.inf


def announce(client: redis.Redis, reads: BacklogReads, worker: str, queue: str) -> None:
    """Write the announcement of a worker that serves a queue with 16 slots."""
    said = orjson.dumps({"state": "ready", "queue": queue, "slots": 16})
    client.hset(keys.WORKERS, worker, b"%d\0%s" % (reads.now_ms(), said))


def test_the_claim_of_a_dead_worker_holds_no_queue(
    reads: BacklogReads, store: BatchStore, redis_client: redis.Redis
) -> None:
    submit_batch(store, 2, batch_id="b1", queue="warmq.b")
    assert reads.claim("warmq.b", "w2", 16, 60, 0)
    assert reads.backlog(QUEUES, "w1", {}).demands["b"].slots == 16  # it starts, perhaps
    made = b"%d" % (reads.now_ms() - 20_000)
    claim = redis_client.hget(keys.SWAP_CLAIMS, "warmq.b\0w2").rpartition(b"\0")[0]
    redis_client.hset(keys.SWAP_CLAIMS, "warmq.b\0w2", claim + b"\0" + made)
    announce(redis_client, reads, "w2", "warmq.a")
    assert reads.backlog(QUEUES, "w1", {}).demands["b"].slots == 16
    redis_client.hdel(keys.WORKERS, "w2")
    found = reads.backlog(QUEUES, "w1", {})
    assert found.demands["b"].slots == 0
    assert reads.claim("warmq.b", "w1", 16, 60, found.claims["b"])


def test_what_another_program_wrote_badly_counts_as_missing(
    reads: BacklogReads, store: BatchStore, redis_client: redis.Redis
) -> None:
    submit_batch(store, 2, batch_id="b1", queue="warmq.b")
    now = reads.now_ms()
    odd = orjson.dumps({"state": "ready", "queue": "warmq.b", "slots": "many", "limit": {}})
    redis_client.hset(keys.WORKERS, "other", b"%d\0%s" % (now, odd))
    redis_client.hset(keys.SWAP_LEFT, "warmq.b", "x")
    redis_client.hset(keys.SWAP_CLAIMS, b"\xff\0w", b"soon\0x")
    redis_client.hset(naming.turns_key("warmq.b"), "mean", "nan")
    redis_client.hset(keys.batch_key("b1"), mapping={"created_at": "?", "deadline": "inf"})
    found = reads.backlog(QUEUES, "w1", {}).demands["b"]
    assert found.requests == 2 and found.slots == 1
    assert found.oldest_s == 0 and found.slack_s == math.inf


def test_one_of_two_workers_that_decided_on_the_same_claims_gets_the_queue(
    reads: BacklogReads, redis_client: redis.Redis
) -> None:
    announce(redis_client, reads, "w1", "warmq.a")
    seen = reads.backlog(QUEUES, "w1", {}).claims["b"]
    assert reads.claim("warmq.b", "w1", 16, 60, seen)
    assert not reads.claim("warmq.b", "w2", 16, 60, seen)
    other = reads.backlog(QUEUES, "w2", {})
    assert other.claims["b"] == 1 and other.demands["b"].slots == 16
    assert reads.backlog(QUEUES, "w1", {}).demands["b"].slots == 0  # its own claim
    reads.end_claim("warmq.b", "w1")
    assert reads.claim("warmq.b", "w2", 16, 0.001, 0)
    assert redis_client.ttl(keys.SWAP_CLAIMS) > 0


def test_of_many_workers_that_read_the_same_backlog_one_swaps(
    reads: BacklogReads, store: BatchStore, redis_server: RedisServer
) -> None:
    submit_batch(store, 12, batch_id="b1", queue="warmq.b")
    terms = dict.fromkeys(QUEUES, Terms(1.0, 0.0))
    together = threading.Barrier(8)

    def swaps(worker: str) -> bool:
        """Decide as a worker of 16 slots does, until the claim is made or nothing is to do."""
        with redis_server.client() as client:
            own, first = BacklogReads(client), True
            while True:
                found = own.backlog(QUEUES, worker, {})
                if first:
                    together.wait(20)
                first = False
                if (swap := choose(Stay("a", 100.0), found.demands, terms)) is None:
                    return False
                if own.claim(QUEUES[swap.model], worker, 16, 60, found.claims[swap.model]):
                    return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(swaps, [f"w{n}" for n in range(8)])) == 1
    assert reads.backlog(QUEUES, "late", {}).demands["b"].slots == 16


def test_the_messages_of_a_cancelled_batch_need_no_model(
    reads: BacklogReads, store: BatchStore, redis_client: redis.Redis
) -> None:
    batches = [submit_batch(store, 5, batch_id=n, queue="warmq.b").batch for n in ("b1", "b2")]
    redis_client.hset(keys.batch_key("b2"), "deadline", reads.now_ms() + 1000)
    store.cancel(batches[0])
    assert reads.backlog(QUEUES, "w1", {}).demands["b"].requests == 5
    store.cancel(batches[1])
    demand = reads.backlog(QUEUES, "w1", {}).demands["b"]
    assert (demand.requests, demand.tokens, demand.slack_s) == (0, 0.0, math.inf)
    assert store.retry(batches[1], ["cancelled"]) == 5
    assert reads.backlog(QUEUES, "w1", {}).demands["b"].requests == 5


def scripts_run(client: redis.Redis) -> int:
    return int(client.info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0))


@pytest.mark.parametrize("whole", [True, False])
def test_the_messages_of_a_cancelled_batch_are_removed_as_a_worker_of_its_model_does(
    reads: BacklogReads, store: BatchStore, redis_client: redis.Redis, whole: bool
) -> None:
    """Also if the client that cancels it has died, so that POP writes the results."""
    cancelled = submit_batch(store, 5, batch_id="b1", queue="warmq.b")
    living = submit_batch(store, 3, batch_id="b2", queue="warmq.b")
    (store.cancel if whole else store.begin_cancel)(cancelled.batch)
    assert reads.backlog(QUEUES, "w1", {}).demands["b"].requests == 3
    assert redis_client.llen(living.list_key) == 3
    assert not redis_client.exists(cancelled.list_key)
    assert redis_client.hget(naming.turns_key("warmq.b"), "waiting") == b"3"
    assert [key for _, _, key in reads.turns("warmq.b")] == [living.list_key]
    batch = store.batch("b1")
    assert batch is not None and batch.finished and batch.number("cancelled") == 5
    assert all(redis_client.exists(kept_key("b1", one)) for one in cancelled.ids)
    assert leftovers(store, ["warmq.a"]) == {}
    results = [orjson.loads(raw or b"") for raw in store.results(cancelled.ids)]
    assert {one["warmq"]["error"]["code"] for one in results} == {"cancelled"}
    assert store.retry(batch, ["cancelled"]) == 5
    assert len(Lessee(redis_client, queue="warmq.b").pop()) == 8


def test_the_messages_of_a_batch_whose_requests_have_ended_are_removed(
    reads: BacklogReads, store: BatchStore, redis_client: redis.Redis
) -> None:
    ended = submit_batch(store, 4, batch_id="b1", queue="warmq.b")
    for n in range(1, 5):
        assert store.cancel_request(ended.batch, f"c{n}") == 1
    batch = store.batch("b1")
    assert batch is not None and batch.finished and redis_client.llen(ended.list_key) == 4
    assert reads.backlog(QUEUES, "w1", {}).demands["b"].requests == 0
    assert leftovers(store, ["warmq.a", "warmq.b"]) == {}


def test_one_call_removes_a_limited_number_of_messages(
    reads: BacklogReads, store: BatchStore, redis_client: redis.Redis
) -> None:
    ended = submit_batch(store, 1500, batch_id="b1", queue="warmq.b")
    store.cancel(ended.batch)
    for left in (500, 0):
        assert reads.backlog(QUEUES, "w1", {}).demands["b"].requests == 0
        assert redis_client.llen(ended.list_key) == left
    assert leftovers(store, ["warmq.a", "warmq.b"]) == {}


def test_messages_of_living_batches_cost_no_script(
    reads: BacklogReads, store: BatchStore, redis_client: redis.Redis
) -> None:
    submit_batch(store, 3, batch_id="b1", queue="warmq.a")
    submit_batch(store, 3, batch_id="b2", queue="warmq.b")
    before = scripts_run(redis_client)
    reads.backlog(QUEUES, "w1", {})
    assert scripts_run(redis_client) == before
    for run in ("run_1", ""):  # lists that may have several batches are searched once
        submit_batch(store, 3, batch_id=f"{run}.0", queue="warmq.b", run=run, fifo=not run)
        before = scripts_run(redis_client)
        for _ in range(3):
            reads.backlog(QUEUES, "w1", {})
        assert scripts_run(redis_client) == before + 1


def test_the_windows_of_a_run_wait_in_a_list_of_its_name(
    reads: BacklogReads, store: BatchStore, redis_client: redis.Redis
) -> None:
    windows = [
        submit_batch(store, count, batch_id=f"run_1.{n}", queue="warmq.b", run="run_1")
        for n, count in enumerate((4, 3))
    ]
    (list_key,) = {window.list_key for window in windows}
    first = reads.backlog(QUEUES, "w1", {}).demands["b"]
    assert first.requests == 7
    assert reads.backlog(QUEUES, "w1", {}).demands["b"].oldest_s > first.oldest_s == 0
    reads.note_left(["warmq.b"])
    assert reads.backlog(QUEUES, "w1", {}).demands["b"].oldest_s < 1
    store.cancel(windows[0].batch)
    others = BacklogReads(redis_client)
    assert others.backlog(QUEUES, "w2", {}).demands["b"].requests == 3
    assert redis_client.llen(list_key) == 3
    assert redis_client.hget(naming.turns_key("warmq.b"), "waiting") == b"3"
    state = store.batch("run_1.0")
    assert state is not None and state.finished and state.number("cancelled") == 4


def test_the_messages_of_a_deleted_batch_are_removed(
    reads: BacklogReads, store: BatchStore, redis_client: redis.Redis
) -> None:
    windows = [
        submit_batch(store, 3, batch_id=f"run_1.{n}", queue="warmq.b", run="run_1").batch
        for n in range(2)
    ]
    for window in windows:
        store.cancel(window)
        assert store.delete(window.id)
    lost = submit_batch(store, 2000, batch_id="b1", queue="warmq.b")
    redis_client.delete(*redis_client.keys("warmq:batch:b1*"))
    redis_client.zrem(keys.BATCHES, "b1")
    assert redis_client.llen(lost.list_key) == 2000
    assert reads.backlog(QUEUES, "w1", {}).demands["b"].requests == 0
    assert leftovers(store, ["warmq.a", "warmq.b"]) == {}


def test_the_messages_of_a_cancelled_batch_in_order_of_arrival_are_removed(
    reads: BacklogReads, store: BatchStore, redis_client: redis.Redis
) -> None:
    first, second = [
        submit_batch(store, count, batch_id=f"b{count}", queue="warmq.b", fifo=True)
        for count in (4, 3)
    ]
    assert first.list_key == second.list_key
    store.cancel(first.batch)
    assert reads.backlog(QUEUES, "w1", {}).demands["b"].requests == 3
    store.cancel(second.batch)
    late = BacklogReads(redis_client).backlog(QUEUES, "w2", {}).demands["b"]
    assert (late.requests, late.oldest_s, late.online_s) == (0, 0.0, None)
    assert leftovers(store, ["warmq.a", "warmq.b"]) == {}


def test_suspects_of_a_cancelled_batch_are_removed(
    reads: BacklogReads, store: BatchStore, redis_client: redis.Redis
) -> None:
    worker = Lessee(redis_client, queue="warmq.b")
    batch = submit_batch(store, 4, batch_id="b1", queue="warmq.b").batch
    for _ in range(2):
        leases = worker.pop()
        worker.release(*leases, died=leases)
    suspects = keys.suspects_list("warmq.b")
    assert redis_client.llen(suspects) == 4
    assert reads.backlog(QUEUES, "w1", {}).demands["b"].requests == 4
    assert reads.backlog(QUEUES, "w1", {}).demands["b"].oldest_s > 0
    store.cancel(batch)
    assert BacklogReads(redis_client).backlog(QUEUES, "w2", {}).demands["b"].requests == 0
    assert not redis_client.exists(suspects)
    assert redis_client.hget(naming.turns_key("warmq.b"), "waiting") in (None, b"0")
    assert leftovers(store, ["warmq.a", "warmq.b"]) == {}


def test_the_revoked_requests_of_a_celery_client_are_removed(
    reads: BacklogReads, store: BatchStore, redis_client: redis.Redis
) -> None:
    redis_client.lpush("warmq.b", celery_message("r1"), celery_message("r2"))
    assert reads.backlog(QUEUES, "w1", {}).demands["b"].requests == 2
    until_s = reads.now_ms() / 1000 + 60
    redis_client.zadd(keys.REVOKED, {"r1": until_s})
    others = BacklogReads(redis_client)
    assert others.backlog(QUEUES, "w2", {}).demands["b"].requests == 1
    redis_client.zadd(keys.REVOKED, {"r2": until_s})
    demand = BacklogReads(redis_client).backlog(QUEUES, "w3", {}).demands["b"]
    assert (demand.requests, demand.oldest_s) == (0, 0.0)


def finish(client: redis.Redis, queue: str, count: int) -> None:
    """Let a worker answer requests of a queue, with 5 tokens each."""
    worker = Lessee(client, queue=queue)
    worker.done(*worker.pop(count))


def test_tenants_of_several_models_have_shares_by_weight_and_by_tokens_served(
    reads: BacklogReads, store: BatchStore, redis_client: redis.Redis
) -> None:
    store.set_tenant(Tenant("x", 3.0))
    submit_batch(store, 20, batch_id="b1", queue="warmq.a", tenant="x")
    submit_batch(store, 20, batch_id="b2", queue="warmq.b", tenant="y")
    first = reads.backlog(QUEUES, "w1", {}).demands
    assert (first["a"].weight, first["a"].due, first["a"].served) == (3.0, 0.75, 0.0)
    assert (first["b"].weight, first["b"].due, first["b"].served) == (1.0, 0.25, 0.0)
    finish(redis_client, "warmq.a", 6)
    finish(redis_client, "warmq.b", 1)
    then = reads.backlog(QUEUES, "w1", {}).demands
    # Of 30 and 5 tokens: 40 and 20 by parts of 3/4 and 1/4.
    assert (then["a"].served, then["b"].served) == (20.0, 0.0)


def test_shares_of_one_tenant_cost_no_read(
    reads: BacklogReads, store: BatchStore, redis_client: redis.Redis
) -> None:
    for name in ("a", "b"):
        submit_batch(store, 3, batch_id=name, queue=f"warmq.{name}", tenant="x")
    finish(redis_client, "warmq.a", 1)

    def commands() -> int:
        return int(redis_client.info()["total_commands_processed"])

    reads.backlog(QUEUES, "w1", {})
    before = commands()
    demands = reads.backlog(QUEUES, "w1", {}).demands
    alone = commands() - before
    assert {(d.weight, d.served, d.due) for d in demands.values()} == {(1.0, 0.0, 0.0)}
    submit_batch(store, 3, batch_id="c", queue="warmq.b", tenant="y")
    before = commands()
    assert reads.backlog(QUEUES, "w1", {}).demands["b"].due > 0
    assert commands() - before > alone
