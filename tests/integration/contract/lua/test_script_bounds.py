"""No script holds Redis for long, whatever has gathered; what is left is for the next call."""

from __future__ import annotations

import redis
from kit.protocol.lessee import QUEUE, Lessee, submit_batch

from contract.redis.batches import BatchStore
from contract.redis.objects import Objects
from gateway.redis.batch_views import BatchView, BatchViews, PartialOrder

DOCUMENT = b'{"status":"completed"}'


def calls(client: redis.Redis) -> int:
    """Return how many scripts were run: time depends on the machine, pieces do not."""
    return int(client.info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0))


def filled(client: redis.Redis, key: str, prefix: str, count: int) -> None:
    for start in range(0, count, 10_000):
        client.zadd(key, {f"{prefix}{n}": n for n in range(start, min(count, start + 10_000))})


def pages(views: BatchViews, limit: int) -> list[BatchView]:
    page = views.page("default", limit=limit)
    assert page is not None
    assert not page.has_more
    return page.batches


def test_lists_with_many_expired_entries_are_read_in_pieces(
    redis_client: redis.Redis, store: BatchStore
) -> None:
    objects, views = Objects.using(store), BatchViews.using(store)
    for kind in ("file", "batch"):
        for n in range(3):
            objects.create(kind, "default", f"{kind}_{n}", n, DOCUMENT)
        filled(redis_client, f"warmq:gateway:{kind}s:default", "gone_", 100_000)
    before = calls(redis_client)
    page = views.page("default", limit=10)
    assert page is not None
    assert [view.id for view in page.batches] == ["batch_2", "batch_1", "batch_0"]
    assert not page.has_more
    for oldest_first in (False, True):
        files = objects.page("file", "default", limit=2, oldest_first=oldest_first)
        assert files is not None
        names = ["file_2", "file_1"] if not oldest_first else ["file_0", "file_1"]
        assert [stored.id for stored in files.objects] == names
        assert files.has_more
        rest = objects.page("file", "default", after=names[1], limit=2, oldest_first=oldest_first)
        assert rest is not None
        assert (len(rest.objects), rest.has_more) == (1, False)
    assert redis_client.zcard("warmq:gateway:files:default") == 3
    assert redis_client.zcard("warmq:gateway:batchs:default") == 3
    assert calls(redis_client) - before >= 2 * 90


def test_batches_of_anthropics_api_are_in_no_list_but_their_own(
    redis_client: redis.Redis, store: BatchStore
) -> None:
    """No page of others reads past them; those of a release before are taken out, in pieces."""
    objects, views = Objects.using(store), BatchViews.using(store)
    objects.create("batch", "default", "batch_0", 0, DOCUMENT)
    for n in range(20):
        objects.create("message_batch", "default", f"msgbatch_{n}", n, b"null")
        objects.create("batch", "default", f"msgbatch_{n}", n, DOCUMENT)
    assert redis_client.zrange("warmq:gateway:batchs:default", 0, -1) == [b"batch_0"]
    before = calls(redis_client)
    assert [view.id for view in pages(views, 10)] == ["batch_0"]
    assert calls(redis_client) - before == 1
    names = {f"msgbatch_{n}": n for n in range(20)}
    redis_client.zadd("warmq:gateway:batchs:default", names)
    filled(redis_client, "warmq:gateway:batchs:default", "msgbatch_before_", 50_000)
    before = calls(redis_client)
    assert [view.id for view in pages(views, 10)] == ["batch_0"]
    assert 45 <= calls(redis_client) - before <= 60
    assert [view.id for view in pages(views, 10)] == ["batch_0"]
    assert calls(redis_client) - before <= 61, "once, not for every list"
    assert redis_client.zrange("warmq:gateway:batchs:default", 0, -1) == [b"batch_0"]
    found = objects.page("message_batch", "default", limit=30)
    assert found is not None
    assert len(found.objects) == 20
    assert all(views.get("default", stored.id) is not None for stored in found.objects)


def test_the_order_of_many_polls_comes_in_pieces(
    redis_client: redis.Redis, store: BatchStore
) -> None:
    key, count = "warmq:gateway:partial:batch_1", 40_000
    parts = [submit_batch(store, 1, batch_id=f"p{n}").batch for n in range(2)]
    for n in range(2):
        redis_client.rpush(f"warmq:batch:p{n}:finished", *(["x"] * (count // 2)))
    rows = {str(n + 1): f"{n} {n % 2} {n // 2} 1" for n in range(count)}
    redis_client.hset(key, mapping=rows)
    redis_client.hset(
        key,
        mapping={"segments": count, "end": count, "seen:0": count // 2, "seen:1": count // 2},
    )
    before = calls(redis_client)
    for begin in (0, 1, count // 2, count - 1):
        end, segments = PartialOrder.using(store).segments("batch_1", parts, begin, 60_000)
        assert end == count
        assert [segment.first for segment in segments] == list(range(begin, count))
    assert calls(redis_client) - before >= 100


def test_a_worker_that_died_with_many_leases_is_swept_in_pieces(
    redis_client: redis.Redis, store: BatchStore
) -> None:
    count = 3000
    dead, other = Lessee(redis_client, "dead"), Lessee(redis_client, "w2")
    submitted = submit_batch(store, count)
    leases = []
    while popped := dead.pop(500, lease_ms=0):
        leases += popped
    assert len(leases) == count
    other.allow_sweep()
    swept, sweeps = 0, 0
    while swept < count:
        found = other.sweep(limit=250)
        assert 0 < found <= 250 + 64
        swept, sweeps = swept + found, sweeps + 1
    assert sweeps >= 10
    # Only the oldest, which the engine had begun, count a death.
    deaths = {name.decode() for name in redis_client.hkeys("warmq:deaths")}
    assert deaths == set(submitted.ids[: len(deaths)])
    order = []
    while popped := other.pop(500):
        order += [lease.request_id for lease in popped]
    assert set(order) == set(submitted.ids)


def test_many_tenants_whose_caps_are_reached_end_their_turns_in_pieces(
    redis_client: redis.Redis, store: BatchStore
) -> None:
    count = 3000
    ring = f"warmq:turns:{QUEUE}\x066"
    for n in range(count):
        redis_client.zadd(f"{ring}\x06t{n}", {f"{QUEUE}\x06\x166\x06t{n}\x06b": 0})
    redis_client.zadd(ring, {f"t{n}": 0 for n in range(count)})
    redis_client.hset("warmq:tenants", mapping={f"t{n}": b"1\x000" for n in range(count)})
    worker = Lessee(redis_client, "w1")
    for n in range(count // 500 + 1):
        assert redis_client.scard(f"warmq:turns:{QUEUE}:capped") <= n * 500
        assert worker.pop(8) == []
    assert redis_client.zcard(ring) == 0
    assert redis_client.scard(f"warmq:turns:{QUEUE}:capped") == count
