"""The order of a queue's deadlines, read from a real Redis."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from kit.commands.doctor_findings import announce
from kit.protocol.lessee import QUEUE, submit_batch

from contract import naming
from contract.redis.batches import BatchStore
from contract.redis.deadlines import DeadlineReads
from contract.redis.tenants import Tenant


def list_of(batch_id: str) -> str:
    return naming.turn_list(QUEUE, 6, naming.DEFAULT_TENANT, batch_id)


@pytest.fixture
def reads(store: BatchStore) -> DeadlineReads:
    return DeadlineReads.using(store)


def work(client: redis.Redis, requests: int = 60, tokens: int = 600) -> None:
    """Note that in this minute a slot did ten tokens a second."""
    minute = int(client.time()[0]) // 60
    value = f"{minute} {requests} 0 {tokens} 0 0 {tokens // 10} 240"
    client.hset(f"warmq:ring:{QUEUE}", str(minute % 1440), value)


def seconds(count: float) -> str:
    return f"+{round(count * 1000)}"


def test_a_queue_without_deadlines_or_pace_has_no_order(
    redis_client: redis.Redis, store: BatchStore, reads: DeadlineReads
) -> None:
    announce(store, slots=4)
    submit_batch(store, 100, batch_id="a")
    assert reads.deadline_order(QUEUE).pace is None
    submit_batch(store, 100, batch_id="due", deadline=seconds(60))
    assert reads.deadline_order(QUEUE).order.urgent == ()
    work(redis_client)
    assert reads.deadline_order(QUEUE).pace is not None


def test_the_batch_that_must_begin_is_urgent_and_the_hopeless_one_is_late(
    redis_client: redis.Redis, store: BatchStore, reads: DeadlineReads
) -> None:
    announce(store, slots=4)
    work(redis_client)  # 40 tokens a second on 4 slots, 10 a request
    submit_batch(store, 400, batch_id="any")
    submit_batch(store, 200, batch_id="due", deadline=seconds(55))  # takes 50 s
    submit_batch(store, 2000, batch_id="hopeless", deadline=seconds(100))  # takes 500 s
    submit_batch(store, 4, batch_id="far", deadline=seconds(100_000))
    found = reads.deadline_order(QUEUE)
    assert found.order.urgent == (list_of("due"),)
    (late,) = found.late
    assert (late.batch_id, late.tenant, late.slots) == ("hopeless", naming.DEFAULT_TENANT, 4)
    assert 500 - 100 < late.late_s < 600
    assert 20 < late.needed < 30


def test_a_cancelled_batch_takes_no_time_and_a_rough_pace_names_nobody(
    redis_client: redis.Redis, store: BatchStore, reads: DeadlineReads
) -> None:
    announce(store, slots=4)
    work(redis_client, requests=20, tokens=200)
    submit_batch(store, 2000, batch_id="hopeless", deadline=seconds(100))
    found = reads.deadline_order(QUEUE)
    assert set(found.order.late) == {list_of("hopeless")}
    assert found.late == ()
    work(redis_client)
    assert len(reads.deadline_order(QUEUE).late) == 1
    batch = store.batch("hopeless")
    assert batch is not None
    store.cancel(batch)
    assert reads.deadline_order(QUEUE).late == ()


def test_the_slots_that_are_needed_are_no_more_than_requests_are_left(
    redis_client: redis.Redis, store: BatchStore, reads: DeadlineReads
) -> None:
    announce(store, slots=4)
    work(redis_client)  # a request takes a second
    submit_batch(store, 300, batch_id="due", deadline=seconds(1000))
    key = naming.deadlines_key(QUEUE)

    def needed(left_s: float) -> int | None:
        redis_client.zadd(key, {list_of("due"): reads.now_ms() + round(left_s * 1000)})
        (late,) = reads.deadline_order(QUEUE).late
        return late.needed

    assert 29 <= (needed(10) or 0) <= 32
    assert 280 <= (needed(1.04) or 0) <= 300
    assert needed(0.9) is None
    reads.set_tenant(Tenant(naming.DEFAULT_TENANT, max_in_flight=3))
    assert needed(50) is None


def test_the_tokens_that_the_batch_expects_or_has_used_count(
    redis_client: redis.Redis, store: BatchStore, reads: DeadlineReads
) -> None:
    def late_s(**fields: Any) -> float:
        if fields:
            redis_client.hset("warmq:batch:due", mapping=fields)
        return reads.deadline_order(QUEUE).late[0].late_s

    announce(store, slots=4)
    work(redis_client)
    submit_batch(store, 400, batch_id="due", deadline=seconds(20))
    assert late_s() == pytest.approx(80, abs=5)
    expected = '{"prompt_tokens":6000,"completion_tokens":2000,"seconds":null}'
    assert late_s(expected=expected) == pytest.approx(180, abs=5)
    used = {"completed": 10, "prompt_tokens": 300, "completion_tokens": 100}
    assert late_s(**used) == pytest.approx(380, abs=5)


def test_tenants_share_the_rate(
    redis_client: redis.Redis, store: BatchStore, reads: DeadlineReads
) -> None:
    announce(store, slots=4)
    work(redis_client)
    submit_batch(store, 200, batch_id="due", deadline=seconds(72))  # 50 s alone
    assert reads.deadline_order(QUEUE).order.urgent == ()
    submit_batch(store, 2000, batch_id="other", tenant="u")
    assert [one.batch_id for one in reads.deadline_order(QUEUE).late] == ["due"]
    reads.set_tenant(Tenant(naming.DEFAULT_TENANT, weight=3.0))
    assert reads.deadline_order(QUEUE).order.urgent == (list_of("due"),)
    reads.set_tenant(Tenant(naming.DEFAULT_TENANT, max_in_flight=1))
    assert [one.batch_id for one in reads.deadline_order(QUEUE).late] == ["due"]
