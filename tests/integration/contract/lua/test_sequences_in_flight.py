"""A request of many sequences takes as many of its tenant's slots as it has sequences."""

from __future__ import annotations

import orjson
import pytest
import redis
from kit.protocol.lessee import QUEUE, Lease, Lessee, celery_message, chat, submit_batch

from contract import naming
from contract.message import write_online
from contract.openai.body import CHAT_URL
from contract.openai.lines import parse_line
from contract.redis import keys
from contract.redis.batches import BatchStore
from contract.redis.tenants import Tenant


def ask(worker: Lessee, name: str, tenant: str, n: int = 1, priority: int = 0) -> None:
    """Push an online chat of `n` answers, as a gateway does."""
    message = write_online(
        name, CHAT_URL, orjson.dumps(chat(n=n)), queue=QUEUE, priority=priority, tenant=tenant,
        deadline=4e9, keep_ms=60_000, sequences=n,
    )  # fmt: skip
    list_key = naming.turn_list(QUEUE, priority, tenant)
    assert worker.run("push", 1000, 0.9, list_key, name, "", message) == [1]


def held(client: redis.Redis, tenant: str) -> int:
    """Return how many slots of a tenant's cap are taken."""
    return int(client.hget(naming.turns_key(QUEUE), f"in_flight:{tenant}") or 0)


def names(leases: list[Lease]) -> list[str]:
    """Return the requests that were leased."""
    return [lease.request_id for lease in leases]


def settled(client: redis.Redis, tenant: str) -> bool:
    """Say whether nothing of a tenant is counted any more."""
    return held(client, tenant) == 0 and not client.exists(keys.SEQUENCES)


@pytest.mark.parametrize("end", ["done", "release", "died", "sweep", "bury"])
def test_a_cap_counts_sequences_until_the_lease_ends(
    store: BatchStore, redis_client: redis.Redis, worker: Lessee, end: str
) -> None:
    store.set_tenant(Tenant("greedy", max_in_flight=10))
    for name in ("one", "two"):
        ask(worker, name, "greedy", 8)
    leases = worker.pop()
    assert names(leases) == ["one"]
    assert held(redis_client, "greedy") == 8
    assert redis_client.hkeys(keys.SEQUENCES) == [leases[0].id.encode()]
    if end == "done":
        worker.done(*leases)
    elif end == "bury":
        worker.bury(leases[0], "unreadable")
    elif end == "sweep":
        worker.expire_leases(*leases)
        assert worker.sweep() == 1
    else:
        worker.release(*leases, died=leases if end == "died" else ())
    assert settled(redis_client, "greedy")
    again = worker.pop()
    assert names(again) == (["two"] if end in ("done", "bury") else ["one"])
    assert held(redis_client, "greedy") == 8


def test_one_larger_than_the_cap_runs_alone_and_others_do_not_wait(
    store: BatchStore, redis_client: redis.Redis, worker: Lessee
) -> None:
    store.set_tenant(Tenant("greedy", max_in_flight=1))
    ask(worker, "first", "greedy")
    ask(worker, "large", "greedy", 128)
    ask(worker, "next", "greedy")
    ask(worker, "polite", "other")
    first = worker.pop()
    assert sorted(names(first)) == ["first", "polite"]
    assert worker.pop() == []
    assert worker.head[3] == 0  # nothing more now: no worker asks again at once
    worker.done(*first)
    large = worker.pop()
    assert names(large) == ["large"]
    assert worker.pop() == []
    worker.done(*large)
    last = worker.pop()
    assert names(last) == ["next"]
    worker.done(*last)
    assert settled(redis_client, "greedy")


def test_a_large_one_is_not_starved_by_the_same_tenants_requests_of_lower_priority(
    store: BatchStore, redis_client: redis.Redis, worker: Lessee
) -> None:
    store.set_tenant(Tenant("greedy", max_in_flight=4))
    for number in range(8):
        ask(worker, f"low-{number}", "greedy", priority=6)
    low = worker.pop(k=4)
    ask(worker, "large", "greedy", 6)
    for lease in low:
        assert worker.pop() == []
        worker.done(lease)
    assert names(worker.pop()) == ["large"]
    assert worker.pop() == []


def test_a_worker_without_room_for_many_leaves_them_to_others_and_takes_single_ones(
    redis_client: redis.Redis, worker: Lessee
) -> None:
    for number in range(5):
        ask(worker, f"large-{number}", "greedy", 128)
    ask(worker, "small", "polite")
    assert sorted(names(worker.pop(most_multi=1))) == ["large-0", "small"]
    assert worker.pop(most_multi=0) == []
    assert worker.head[3] == 0
    ask(worker, "small-2", "polite")
    assert names(worker.pop(most_multi=0)) == ["small-2"]
    other = Lessee(redis_client, "w2")
    assert names(other.pop()) == [f"large-{number}" for number in range(1, 5)]


def test_lines_of_a_batch_and_plain_messages_say_how_many_they_are(
    store: BatchStore, redis_client: redis.Redis, worker: Lessee
) -> None:
    submit_batch(store, tenant="greedy", bodies=[chat(n=3), chat()])
    assert len(worker.pop()) == 2
    assert held(redis_client, "greedy") == 4
    line = {"custom_id": "a", "url": CHAT_URL, "body": chat(n=7)}
    assert parse_line(orjson.dumps(line)).sequences == 7
    assert parse_line(orjson.dumps(chat(n=7))).sequences == 7
    for number, said in enumerate([1.5, -1, 0, "8", None, 1e9, True]):
        message = celery_message(f"plain-{number}", warmq={"sequences": said})
        redis_client.lpush(QUEUE, message)
    assert len(worker.pop()) == 7
    assert held(redis_client, "celery") == 7


def test_what_a_worker_of_0_2_swept_is_counted_until_the_next_sweep(
    redis_client: redis.Redis, worker: Lessee
) -> None:
    ask(worker, "large", "greedy", 8)
    (lease,) = worker.pop()
    # As its RELEASE does: one slot back, and the lease on its way to its list.
    redis_client.hincrby(naming.turns_key(QUEUE), "in_flight:greedy", -1)
    redis_client.zrem(keys.LEASES, lease.id)
    redis_client.hdel(keys.worker_key(worker.worker), lease.id)
    worker.sweep()
    assert settled(redis_client, "greedy")
