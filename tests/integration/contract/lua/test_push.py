"""PUSH: online requests queued together, each of its tenant, once where that is asked."""

from __future__ import annotations

import orjson
import pytest
import redis
from kit.protocol.lessee import QUEUE, Lessee, celery_message, submit_batch
from kit.verdicts.owners import ownerless

from contract import naming
from contract.message import read_body, read_delivery, write_online
from contract.openai.body import CHAT_URL
from contract.redis import keys
from contract.redis.batches import BatchStore

BODY = {"messages": [{"role": "user", "content": 'quotes ", backslashes \\ and 한국어'}]}
FAR = 4e9


def message(request_id: str, **fields: object) -> bytes:
    given: dict[str, object] = {
        "queue": QUEUE, "priority": 0, "tenant": "t", "deadline": FAR, "keep_ms": 5000,
    }  # fmt: skip
    return write_online(request_id, CHAT_URL, orjson.dumps(BODY), **(given | fields))  # type: ignore[arg-type]


def push(
    worker: Lessee, *ids: str, tenant: str = "t", priority: int = 0, once_ms: object = "",
    most: int = 1000, fraction: float = 0.9,
) -> list[object]:  # fmt: skip
    args: list[object] = []
    for request_id in ids:
        text = message(request_id, tenant=tenant, priority=priority)
        args += [naming.turn_list(QUEUE, priority, tenant), request_id, once_ms, text]
    return list(worker.run("push", most, fraction, *args))


def test_what_is_pushed_is_read_as_it_was_sent(worker: Lessee) -> None:
    assert push(worker, "a") == [1]
    (lease,) = worker.pop()
    delivery = read_delivery(lease.id, lease.message)
    assert read_body(delivery) == BODY
    assert (delivery.request_id, delivery.url, delivery.deadline) == ("a", CHAT_URL, FAR)
    assert (delivery.batch, delivery.keep_ms) == ("", 5000)


def test_requests_leave_in_the_order_in_which_they_came(worker: Lessee) -> None:
    ids = [f"r{n}" for n in range(2500)]
    assert push(worker, *ids, most=10_000) == [1] * 2500
    found: list[str] = []
    while leases := worker.pop(500):
        found += [lease.request_id for lease in leases]
    assert found == ids


def test_tenants_have_turns(worker: Lessee) -> None:
    push(worker, *(f"a{n}" for n in range(100)), tenant="a")
    push(worker, *(f"b{n}" for n in range(10)), tenant="b")
    got = [lease.request_id[0] for lease in worker.pop(80, slots=8)]
    assert got.count("b") == 10


def test_online_requests_overtake_a_batch(store: BatchStore, worker: Lessee) -> None:
    submit_batch(store, 50)
    push(worker, "urgent")
    assert worker.pop(1)[0].request_id == "urgent"


def test_above_the_mark_nothing_is_queued_and_the_reason_is_told(worker: Lessee) -> None:
    assert push(worker, "a", "b", most=2) == [1, 1]
    assert push(worker, "c", most=2) == [b"2 requests wait in the queue"]
    assert len(worker.pop()) == 2


def test_above_the_memory_mark_nothing_is_queued(worker: Lessee, redis_client: redis.Redis) -> None:
    redis_client.config_set("maxmemory", 2**30)
    try:
        (answer,) = push(worker, "a", fraction=0.000001)
        assert b"of 1073741824 bytes" in answer  # type: ignore[operator]
    finally:
        redis_client.config_set("maxmemory", 0)


def test_a_request_with_a_mark_is_queued_once(worker: Lessee, redis_client: redis.Redis) -> None:
    assert push(worker, "a", "a", once_ms=60_000) == [1, 0]
    assert push(worker, "a", once_ms=60_000) == [0]
    (lease,) = worker.pop()
    assert push(worker, "a", once_ms=60_000) == [0]
    worker.done(lease)
    (meta,) = push(worker, "a", once_ms=60_000)
    assert meta == redis_client.get(keys.result_key("a"))
    assert worker.pop() == []


def test_a_known_answer_is_given_even_above_the_mark(worker: Lessee) -> None:
    push(worker, "a", once_ms=60_000)
    worker.done(*worker.pop())
    push(worker, "b")
    assert push(worker, "a", once_ms=60_000, most=1) != [b"1 requests wait in the queue"]


@pytest.mark.parametrize("outcome", ["failed", "expired", "cancelled"])
def test_a_failure_that_a_second_attempt_may_mend_is_run_again(
    worker: Lessee, outcome: str
) -> None:
    push(worker, "a", once_ms=60_000)
    worker.done(*worker.pop(), outcome=outcome)
    assert push(worker, "a", once_ms=60_000) == [1]
    assert [lease.request_id for lease in worker.pop()] == ["a"]


def test_a_result_is_kept_as_long_as_its_message_says(
    worker: Lessee, redis_client: redis.Redis
) -> None:
    push(worker, "a")
    (lease,) = worker.pop()
    args = [lease.id, "a", "", 5000, "completed", 0, 1, 1, '{"status":"SUCCESS"}']
    worker.run("done", worker.worker, 60_000, *args)
    assert 0 < redis_client.pttl(keys.result_key("a")) <= 5000


@pytest.mark.parametrize("keep_ms", ["-1", "nan", "inf", "1e300", "0", "x", "", "60001"])
def test_a_senseless_time_to_keep_a_result_is_ignored(
    worker: Lessee, redis_client: redis.Redis, keep_ms: str
) -> None:
    push(worker, "a")
    (lease,) = worker.pop()
    args = [lease.id, "a", "", keep_ms, "completed", 0, 1, 1, '{"status":"SUCCESS"}']
    worker.run("done", worker.worker, 60_000, *args)
    assert 50_000 < redis_client.pttl(keys.result_key("a")) <= 60_000


def test_a_request_past_its_deadline_is_not_run_and_its_result_is_short_lived(
    worker: Lessee, redis_client: redis.Redis
) -> None:
    text = message("a", deadline=1.0)
    worker.run("push", 1000, 0.9, naming.turn_list(QUEUE, 0, "t"), "a", "", text)
    assert worker.pop() == []
    assert b'"code":"expired"' in (redis_client.get(keys.result_key("a")) or b"")
    assert 0 < redis_client.pttl(keys.result_key("a")) <= 5000


def test_a_suspect_goes_back_to_the_list_of_its_tenant(worker: Lessee, other: Lessee) -> None:
    push(worker, "a", tenant="own")
    for _ in range(2):
        leases = worker.pop()
        worker.release(*leases, died=leases)
    suspects = keys.suspects_list(QUEUE)
    assert worker.client.llen(suspects) == 1
    (lease,) = other.pop(lists=[suspects])
    record = other.client.hget(keys.worker_key(other.worker), lease.id)
    home = naming.turn_list(QUEUE, 0, "own").encode()
    assert record.split(b"\0")[4] == home  # type: ignore[union-attr]
    assert other.client.hget(naming.turns_key(QUEUE), "in_flight:own") == b"1"


def test_a_suspect_of_a_plain_client_goes_back_to_kombus_list(
    worker: Lessee, redis_client: redis.Redis
) -> None:
    redis_client.lpush(QUEUE, celery_message("plain"))
    for _ in range(2):
        leases = worker.pop()
        worker.release(*leases, died=leases)
    (lease,) = worker.pop(lists=[keys.suspects_list(QUEUE)])
    record = redis_client.hget(keys.worker_key(worker.worker), lease.id)
    assert record.split(b"\0")[4] == QUEUE.encode()  # type: ignore[union-attr]


def test_nothing_is_left_without_an_owner_or_an_end(
    worker: Lessee, redis_client: redis.Redis
) -> None:
    push(worker, "a", "b", once_ms=60_000)
    worker.done(*worker.pop())
    assert worker.pop() == []
    assert ownerless(redis_client) == {}
