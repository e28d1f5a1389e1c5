"""What people may look at of one request and of tenants: attempts without an answer, tokens."""

from __future__ import annotations

import redis
from kit.commands.doctor_findings import announce
from kit.protocol.lessee import QUEUE, Lessee, submit_batch

from contract import naming
from contract.redis import keys
from contract.redis.batches import BatchStore
from contract.redis.tenants import Tenants
from producer.request_reads import RequestReads, RequestState


def look(store: BatchStore, custom_id: str = "c1") -> RequestState:
    batch = store.batch("b1")
    assert batch is not None
    found = RequestReads.using(store).request(
        batch, naming.request_id(batch.id, custom_id), ["w1", "w2"]
    )
    assert found is not None
    return found


def test_each_attempt_is_told_with_its_worker_its_end_and_why_also_after_the_answer(
    redis_client: redis.Redis, store: BatchStore
) -> None:
    submit_batch(store, 1)
    first, second = Lessee(redis_client, "w1"), Lessee(redis_client, "w2")
    (lease,) = first.pop()
    first.release(lease)
    (lease,) = second.pop()
    second.release(lease, died=[lease], max_deaths=9)
    (lease,) = first.pop()
    before = store.now_ms()
    second.expire_leases(lease)
    assert second.sweep(max_deaths=9) == 1
    (lease,) = second.pop()
    second.done(lease)
    tries = look(store).attempts
    told = [("w1", "returned"), ("w2", "died"), ("w1", "lease")]
    assert [(one.worker, one.why) for one in tries] == told
    assert [one.at_ms for one in tries] == sorted(one.at_ms for one in tries)
    assert before <= tries[-1].at_ms <= store.now_ms()


def test_a_request_that_waits_has_had_no_attempt_and_one_that_runs_its_first(
    redis_client: redis.Redis, store: BatchStore
) -> None:
    submit_batch(store, 2)
    lessee = Lessee(redis_client, "w1")
    (lease,) = lessee.pop(1)
    assert look(store).deliveries == 1
    lessee.release(lease)
    assert look(store).deliveries == 1
    lessee.pop(1)
    assert look(store).deliveries == 2


def test_the_requests_of_a_front_end_are_found(
    redis_client: redis.Redis, store: BatchStore
) -> None:
    submitted = submit_batch(store, 2)
    announce(store, "w0", queue=QUEUE)
    announce(store, "w0.1", queue=QUEUE, part_of="w0")
    Lessee(redis_client, "w0.1").pop(1)
    reads = RequestReads.using(store)
    assert set(reads.holders()) == {"w0", "w0.1"}
    (one,) = reads.running(submitted.batch, reads.living(), 9)
    assert one.worker == "w0.1"


def test_attempts_are_few_however_often_one_was_made_and_end_with_their_batch(
    redis_client: redis.Redis, store: BatchStore
) -> None:
    submitted = submit_batch(store, 1)
    lessee = Lessee(redis_client)
    for _ in range(15):
        lessee.release(*lessee.pop())
    key = keys.attempts_key(submitted.ids[0])
    assert redis_client.llen(key) == 10
    assert 0 < redis_client.pttl(key) <= lessee.ttl_ms
    lessee.done(*lessee.pop())
    assert store.delete("b1")
    assert not redis_client.exists(key)


def test_tokens_of_the_last_hour_are_told_by_tenant_and_of_the_hour_before_in_part(
    redis_client: redis.Redis, store: BatchStore
) -> None:
    lessee, reads = Lessee(redis_client), Tenants.using(store)
    for tenant, count in (("alpha", 3), ("beta", 1)):
        submit_batch(store, count, batch_id=tenant, tenant=tenant)
    lessee.done(*lessee.pop())
    found = reads.used([QUEUE, "another"])
    assert found == {"alpha": 15, "beta": 5} or all(v > 0 for v in found.values())  # a full hour
    hour = store.now_ms() // 3_600_000
    redis_client.hset(keys.used_key(QUEUE, hour - 1), "before", 3_600_000)
    some = reads.used([QUEUE])["before"]
    assert 0 <= some <= 3_600_000
    assert reads.used([QUEUE])["before"] <= some
    for key in redis_client.scan_iter("warmq:used:*"):
        if not key.endswith(b":%d" % (hour - 1)):
            assert 0 < redis_client.pttl(key) <= 3 * 3_600_000
