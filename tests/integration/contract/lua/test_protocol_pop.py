"""POP against its own holes: garbage, doubles, limits, what must not run."""

from __future__ import annotations

import base64
import pickle
from typing import Any

import orjson
import pytest
import redis
from kit.protocol import script_keys
from kit.protocol.lessee import (
    QUEUE,
    Lessee,
    celery_message,
    dead_messages,
    now,
    queued_ids,
    result_of,
    stored,
    submit_batch,
)

from contract import naming
from contract.redis import keys
from contract.redis.batches import BatchStore


def push(client: redis.Redis, *messages: bytes, list_key: str = QUEUE) -> None:
    """Queue messages so that the first is popped first."""
    client.lpush(list_key, *messages)


def with_header(name: str, value: bytes) -> bytes:
    """Return a message with a raw JSON value spliced in as a header."""
    return celery_message("odd").replace(
        b'"headers":{', b'"headers":{"%s":%s,' % (name.encode(), value), 1
    )


GARBAGE: dict[str, bytes] = {
    "no JSON at all": b"\x00\xff garbage",
    "an empty message": b"",
    "a cut message": celery_message("cut")[:-20],
    "a JSON array": b"[1,2,3]",
    "a JSON text": b'"warmq.generate"',
    "a JSON null": b"null",
    "no headers": b'{"body":"","properties":{}}',
    "headers that are a list": b'{"body":"","headers":["id"],"properties":{}}',
    "no id": b'{"body":"","headers":{"task":"warmq.generate"},"properties":{}}',
    "an id that is a number": b'{"body":"","headers":{"id":7},"properties":{}}',
    "an empty id": celery_message(""),
    "no body": b'{"headers":{"id":"x"},"properties":{}}',
    "a body that is an object": b'{"body":{},"headers":{"id":"x"},"properties":{}}',
    "no properties": b'{"body":"","headers":{"id":"x"}}',
    "a pickle": pickle.dumps({"body": "", "headers": {"id": "x"}}),
    "base64 of a message": base64.b64encode(celery_message("wrapped")),
    "nesting 2,000 deep": with_header("deep", b"[" * 2000 + b"]" * 2000),
    "a lone surrogate": with_header("text", rb'"\ud800"'),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_among_good_messages_becomes_a_dead_letter_and_the_rest_is_leased(
    worker: Lessee, redis_client: redis.Redis, store: BatchStore, garbage: bytes
) -> None:
    push(redis_client, celery_message("before"), garbage, celery_message("after"))
    leases = worker.pop()
    assert [lease.request_id for lease in leases] == ["before", "after"]
    (letter,) = store.dead_letters()
    assert dead_messages(store) == [garbage]
    assert letter["list"] == QUEUE
    assert letter["reason"]
    assert redis_client.llen(QUEUE) == 0
    assert redis_client.zcard(keys.LEASES) == 2


def test_pop_meets_only_garbage_and_says_there_is_nothing(
    worker: Lessee, redis_client: redis.Redis, store: BatchStore
) -> None:
    push(redis_client, b"one", b"two")
    assert worker.pop() == []
    assert worker.head[3] == 0
    assert dead_messages(store) == [b"one", b"two"]


@pytest.mark.parametrize(
    "batch",
    ["b1:index", "b1:finished", "b1:failed", "a\0b", "x" * 5000],
    ids=["index", "finished", "failed", "NUL", "long"],
)
def test_a_message_whose_batch_names_another_kind_of_key_blocks_nothing(
    worker: Lessee, redis_client: redis.Redis, store: BatchStore, batch: str
) -> None:
    submitted = submit_batch(store, 2, priority=0)
    redis_client.hset(keys.batch_key("b1", "failed"), "x", "y")
    redis_client.rpush(keys.batch_key("b1", "finished"), "x")
    hostile = celery_message("hostile", warmq={"batch": batch, "life": submitted.batch.life})
    redis_client.rpush(QUEUE, hostile)  # the next to be popped
    leases = worker.pop()
    assert [lease.request_id for lease in leases] == submitted.ids
    assert redis_client.llen(QUEUE) == 0
    assert redis_client.zcard(keys.LEASES) == 2


def test_a_result_key_of_another_type_blocks_nothing(
    worker: Lessee, redis_client: redis.Redis, store: BatchStore
) -> None:
    redis_client.hset(keys.result_key("odd"), "not", "ours")
    push(redis_client, celery_message("good"), celery_message("odd"), celery_message("last"))
    assert [lease.request_id for lease in worker.pop()] == ["good", "last"]
    assert len(list(store.dead_letters())) == 1
    assert redis_client.llen(QUEUE) == 0


@pytest.mark.parametrize(
    "value", [b"1e999", b"-1e999", b"123456789012345678901234567890", b"1e308", b"NaN", b"0x10"]
)
def test_strange_numbers_in_headers_stop_nothing(
    worker: Lessee, redis_client: redis.Redis, value: bytes
) -> None:
    ours = b'{"batch":"","line":%s,"deadline":%s}' % (value, value)
    push(redis_client, with_header("warmq", ours), celery_message("good"))
    leases = worker.pop()
    # Some are already expired by their deadline; none may take the good one with it.
    assert leases[-1].message == celery_message("good")
    assert redis_client.llen(QUEUE) == 0


def test_two_messages_with_one_delivery_tag_get_leases_of_their_own(
    worker: Lessee, redis_client: redis.Redis
) -> None:
    twin = celery_message("b").replace(b'"delivery_tag":"b"', b'"delivery_tag":"a"')
    push(redis_client, celery_message("a"), twin)
    first, second = worker.pop()
    assert first.id != second.id
    assert worker.done(first) == 1
    assert stored(redis_client, "b") is None
    assert redis_client.zcard(keys.LEASES) == 1
    assert worker.done(second) == 1
    assert stored(redis_client, "b")


def test_one_task_id_twice_is_leased_twice_and_answered_once(
    worker: Lessee, redis_client: redis.Redis
) -> None:
    push(redis_client, celery_message("same"), celery_message("same"))
    first, second = worker.pop()
    assert worker.done(first) == 1
    assert worker.done(second) == 0
    assert redis_client.zcard(keys.LEASES) == 0
    assert redis_client.hlen(script_keys.worker_key("w1")) == 0


def test_a_message_whose_result_exists_is_dropped(
    worker: Lessee, redis_client: redis.Redis
) -> None:
    push(redis_client, celery_message("same"))
    worker.done(*worker.pop())
    push(redis_client, celery_message("same"))
    assert worker.pop() == []
    assert redis_client.llen(QUEUE) == 0


def test_priorities_come_in_order_and_equals_in_order_of_arrival(
    worker: Lessee, redis_client: redis.Redis
) -> None:
    for priority in (9, 6, 3, 0):
        key = naming.priority_list(QUEUE, priority)
        push(redis_client, *(celery_message(f"p{priority}-{n}") for n in range(2)), list_key=key)
    expected = [f"p{priority}-{n}" for priority in (0, 3, 6, 9) for n in range(2)]
    assert [lease.request_id for lease in worker.pop(5)] == expected[:5]
    assert worker.head[3] == 1
    assert [lease.request_id for lease in worker.pop(5)] == expected[5:]
    assert worker.head[3] == 0


def test_pop_takes_no_more_than_it_was_asked_for(worker: Lessee, redis_client: redis.Redis) -> None:
    push(redis_client, *(celery_message(f"r{n}") for n in range(200)))
    assert len(worker.pop(150)) == 150
    assert queued_ids(redis_client, QUEUE)[0] == "r150"
    assert worker.pop(0) == []
    assert redis_client.llen(QUEUE) == 50


def test_pop_stops_at_its_byte_limit_but_always_takes_one(
    worker: Lessee, redis_client: redis.Redis
) -> None:
    push(redis_client, *(celery_message(f"r{n}", {"prompt": "x" * 1000}) for n in range(5)))
    assert [lease.request_id for lease in worker.pop(max_bytes=1)] == ["r0"]
    size = len(celery_message("r0", {"prompt": "x" * 1000}))
    assert [lease.request_id for lease in worker.pop(max_bytes=2 * size)] == ["r1", "r2"]
    assert worker.head[3] == 1


def test_a_lost_reply_leaves_every_message_leased(
    worker: Lessee, redis_client: redis.Redis
) -> None:
    push(redis_client, celery_message("a"), celery_message("b"))
    lost = worker.pop()  # the worker never sees this
    assert worker.pop() == []
    lost_ids, unknown = worker.renew()
    assert (lost_ids, sorted(unknown)) == ([], [lease.id for lease in lost])
    worker.release(*lost)
    assert queued_ids(redis_client, QUEUE) == ["a", "b"]
    again = worker.pop()
    assert [lease.request_id for lease in again] == ["a", "b"]
    assert [(lease.returns, lease.deaths) for lease in again] == [(1, 0), (1, 0)]


def test_requests_of_a_cancelled_batch_end_when_pop_meets_them(
    worker: Lessee, redis_client: redis.Redis, store: BatchStore
) -> None:
    submitted = submit_batch(store, 3)
    worker.run("cancel", submitted.id, submitted.batch.life, 1, 60_000)
    push(redis_client, b"garbage", list_key=submitted.list_key)
    assert worker.pop() == []
    batch = now(store, submitted.id)
    assert batch.number("cancelled") == 3
    assert batch.status == "cancelled"
    meta = result_of(redis_client, submitted.ids[0])
    assert meta["status"] == "REVOKED"
    assert meta["warmq"]["error"]["code"] == "cancelled"
    assert meta["warmq"]["custom_id"] == "c1"
    assert len(list(store.dead_letters())) == 1


def test_requests_past_their_deadline_end_as_expired(
    worker: Lessee, redis_client: redis.Redis, store: BatchStore
) -> None:
    submitted = submit_batch(store, 1)
    raw = redis_client.lpop(submitted.list_key)
    redis_client.lpush(submitted.list_key, raw.replace(b'"deadline":null', b'"deadline":1.5'))
    assert worker.pop() == []
    meta = result_of(redis_client, submitted.ids[0])
    assert meta["warmq"]["error"]["code"] == "expired"
    batch = now(store, submitted.id)
    assert batch.status == "expired"


def test_revoked_requests_end_when_pop_meets_them(
    worker: Lessee, redis_client: redis.Redis
) -> None:
    redis_client.zadd(keys.REVOKED, {"a": 2e9})
    push(redis_client, celery_message("a"), celery_message("b"))
    assert [lease.request_id for lease in worker.pop()] == ["b"]
    meta = result_of(redis_client, "a")
    assert meta["result"]["exc_type"] == "TaskRevokedError"
    assert redis_client.pttl(keys.result_key("a")) > 0


def test_a_client_that_ignores_results_gets_none_for_a_revoked_request(
    worker: Lessee, redis_client: redis.Redis
) -> None:
    redis_client.zadd(keys.REVOKED, {"a": 2e9})
    push(redis_client, celery_message("a", ignore_result=True))
    assert worker.pop() == []
    assert stored(redis_client, "a") is None
    assert redis_client.llen(QUEUE) == 0


def test_messages_of_a_deleted_batch_are_dropped_without_a_trace(
    worker: Lessee, redis_client: redis.Redis, store: BatchStore
) -> None:
    submitted = submit_batch(store, 2)
    redis_client.delete(keys.batch_key(submitted.id))
    redis_client.hset(keys.RETURNS, submitted.ids[0], 1)
    assert worker.pop() == []
    assert redis_client.llen(submitted.list_key) == 0
    assert stored(redis_client, submitted.ids[0]) is None
    assert not redis_client.exists(keys.batch_key(submitted.id))
    assert not redis_client.hexists(keys.RETURNS, submitted.ids[0])


def test_pop_looks_at_a_bounded_number_of_messages_in_one_call(
    worker: Lessee, redis_client: redis.Redis, store: BatchStore
) -> None:
    submitted = submit_batch(store, 2500)
    worker.run("cancel", submitted.id, submitted.batch.life, 1, 60_000)
    rounds = 0
    while worker.pop(8) or worker.head[3]:
        rounds += 1
        assert rounds < 5
    assert rounds == 2
    assert redis_client.llen(submitted.list_key) == 0
    assert store.batch(submitted.id).number("cancelled") == 2500  # type: ignore[union-attr]


def test_fields_of_the_wrong_type_are_passed_on_to_the_worker(
    worker: Lessee, redis_client: redis.Redis
) -> None:
    ours: dict[str, Any] = {"batch": 7, "custom_id": {}, "line": "1", "deadline": "soon"}
    push(redis_client, celery_message("odd", warmq=ours), celery_message("odd2", warmq=[1]))
    leases = worker.pop()
    assert [lease.request_id for lease in leases] == ["odd", "odd2"]
    assert orjson.loads(leases[0].message)["headers"]["warmq"] == ours


def test_a_redis_that_lost_its_last_writes_gives_no_lease_number_twice(
    redis_client: redis.Redis, store: BatchStore
) -> None:
    lessee = Lessee(redis_client)
    submit_batch(store, 4)
    known = lessee.pop(2)
    highest = max(int(lease.id.rpartition("/")[2]) for lease in known)
    redis_client.set(keys.LEASE_SEQ, 0)  # as after a failover that came before the replica's copy
    again = lessee.pop(2, floor=highest)
    assert len({lease.id for lease in (*known, *again)}) == 4
    assert lessee.done(*known, *again) == 4


def test_a_worker_key_that_is_no_hash_loses_nothing(
    worker: Lessee, redis_client: redis.Redis
) -> None:
    push(redis_client, celery_message("t1"))
    redis_client.set(script_keys.worker_key("w1"), "odd")
    with pytest.raises(redis.exceptions.ResponseError, match="WRONGTYPE"):
        worker.pop()
    assert queued_ids(redis_client, QUEUE) == ["t1"]


def test_a_message_that_calls_its_list_its_batch_ends_alone(
    worker: Lessee, redis_client: redis.Redis
) -> None:
    """Its batch is unknown, but the list is not that batch's: others' messages are in it."""
    forged = celery_message("forged", warmq={"batch": "\x163", "v": 2})
    others = [celery_message(f"other-{n}") for n in range(3)]
    push(redis_client, forged, *others, list_key=naming.priority_list(QUEUE, 3))
    assert [lease.request_id for lease in worker.pop()] == [f"other-{n}" for n in range(3)]
