"""Amounts that scripts meet at the worst: each filled into an empty Redis, then asked for.

A large amount must be met in pieces: `ask` calls scripts until it has seen all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import redis
from kit.protocol.lessee import QUEUE, Lessee, submit_batch

from contract.redis import keys
from contract.redis.batches import BatchStore
from contract.redis.objects import Objects
from gateway.redis.batch_views import BatchViews, PartialOrder

DOCUMENT = b'{"status":"completed"}'
Ask = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Amount:
    """`fill` puts `count` of something into Redis, and returns what calls the scripts."""

    what: str
    count: int
    fill: Callable[[BatchStore, redis.Redis, int], Ask]


def listed(client: redis.Redis, key: str, prefix: str, count: int) -> None:
    """Put names into a list of objects."""
    for start in range(0, count, 10_000):
        client.zadd(key, {f"{prefix}{n}": n for n in range(start, min(count, start + 10_000))})


def _views(prefix: str) -> Callable[[BatchStore, redis.Redis, int], Ask]:
    def fill(store: BatchStore, client: redis.Redis, count: int) -> Ask:
        Objects.using(store).create("batch", "default", "batch_0", 0, DOCUMENT)
        listed(client, "warmq:gateway:batchs:default", prefix, count)
        return lambda: BatchViews.using(store).page("default", limit=20)

    return fill


def _files(store: BatchStore, client: redis.Redis, count: int) -> Ask:
    Objects.using(store).create("file", "default", "file_0", 0, DOCUMENT)
    listed(client, "warmq:gateway:files:default", "gone_", count)
    return lambda: Objects.using(store).page("file", "default", limit=20)


def tenants(client: redis.Redis, count: int, terms: bytes | None, sequences: int = 1) -> None:
    """Give so many tenants one message each, and their terms where there are any."""
    ring = f"warmq:turns:{QUEUE}\x066"
    pipe = client.pipeline()
    for n in range(count):
        waiting = f"{QUEUE}\x06\x166\x06t{n}\x06b"
        pipe.zadd(f"{ring}\x06t{n}", {waiting: 0})
        pipe.lpush(waiting, _message(f"r{n}", sequences))
    pipe.execute()
    client.zadd(ring, {f"t{n}": 0 for n in range(count)})
    if terms is not None:
        client.hset("warmq:tenants", mapping={f"t{n}": terms for n in range(count)})


def _message(request_id: str, sequences: int) -> bytes:
    return (
        '{"body":"W10=","content-encoding":"utf-8","content-type":"application/json","headers":'
        f'{{"id":"{request_id}","task":"warmq.generate","warmq":{{"sequences":{sequences}}}}},'
        '"properties":{"priority":6}}'
    ).encode()


def _all_popped(client: redis.Redis, many: int = 1000) -> Ask:
    def ask() -> None:
        worker = Lessee(client, "w1")
        while True:
            leases = worker.pop(64, most_multi=many)
            if not leases and not int(worker.head[3]):
                return
            worker.done(*leases)

    return ask


def _capped(store: BatchStore, client: redis.Redis, count: int) -> Ask:
    tenants(client, count, b"1\x000")
    return _all_popped(client)


def _too_large(store: BatchStore, client: redis.Redis, count: int) -> Ask:
    tenants(client, count, None, sequences=64)
    return lambda: Lessee(client, "w1").pop(64, most_multi=0)


def _cancelled(store: BatchStore, client: redis.Redis, count: int) -> Ask:
    for n in range(0, count, 10_000):
        submit_batch(store, min(10_000, count - n), batch_id=f"b{n}")
        client.hset(keys.batch_key(f"b{n}"), "cancelling", 1)
    return _all_popped(client)


def _leases(step_ms: int) -> Callable[[BatchStore, redis.Redis, int], Ask]:
    def fill(store: BatchStore, client: redis.Redis, count: int) -> Ask:
        dead, other = Lessee(client, "dead"), Lessee(client, "w2")
        submit_batch(store, count)
        while dead.pop(500, lease_ms=step_ms + 60_000 if step_ms else 0):
            pass
        other.allow_sweep()
        if step_ms:
            client.hincrby(keys.SWEEP, "last", step_ms)

        def ask() -> None:
            while other.sweep(limit=250) > 0:
                pass

        return ask

    return fill


def _renewed(store: BatchStore, client: redis.Redis, count: int) -> Ask:
    worker = Lessee(client, "w1")
    submit_batch(store, count)
    leases = []
    while popped := worker.pop(500):
        leases += [lease.id for lease in popped]
    return lambda: worker.renew(*leases)


def _order(store: BatchStore, client: redis.Redis, count: int) -> Ask:
    key = "warmq:gateway:partial:batch_1"
    parts = [submit_batch(store, 1, batch_id=f"p{n}").batch for n in range(2)]
    for part in parts:
        client.rpush(f"{keys.batch_key(part.id)}:finished", *(["x"] * (count // 2)))
    client.hset(key, mapping={str(n + 1): f"{n} {n % 2} {n // 2} 1" for n in range(count)})
    seen = {"segments": count, "end": count, "seen:0": count // 2, "seen:1": count // 2}
    client.hset(key, mapping=seen)
    return lambda: PartialOrder.using(store).segments("batch_1", parts, 0, 60_000)


def _listed_batches(store: BatchStore, client: redis.Redis, count: int) -> Ask:
    listed(client, "warmq:batches", "gone_", count)
    return lambda: store._run("list", 100)


AMOUNTS = (
    Amount("expired batches in a list", 100_000, _views("gone_")),
    Amount("batches of Anthropic's API that a release before listed", 100_000, _views("msgbatch_")),
    Amount("expired files in a list", 100_000, _files),
    Amount("tenants whose caps are reached at once", 10_000, _capped),
    Amount("tenants whose requests of many sequences find no room", 10_000, _too_large),
    Amount("requests of batches that are being cancelled", 100_000, _cancelled),
    Amount("leases of a dead worker", 5_000, _leases(0)),
    Amount("leases when Redis' clock steps back", 5_000, _leases(600_000)),
    Amount("leases that one worker renews", 5_000, _renewed),
    Amount("segments of the order of a batch's parts", 40_000, _order),
    Amount("batches of the queue", 100_000, _listed_batches),
)


@dataclass(slots=True)
class Call:
    """One call of a script: how many commands it gave to Redis."""

    script: str
    commands: int


@contextmanager
def counted_calls(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Call]]:
    """Yield the calls of scripts that any client of this process makes, as they are made."""
    found: list[Call] = []
    send = redis.Redis._execute_command  # type: ignore[attr-defined]

    def given() -> int:
        stats = send(client, "INFO", "commandstats")
        return sum(one["calls"] for one in stats.values())

    def counting(self: Any, *args: Any, **options: Any) -> Any:
        if args[0] != "EVALSHA":
            return send(self, *args, **options)
        before = given()
        answer = send(self, *args, **options)
        found.append(Call(str(args[1]), given() - before - 2))  # EVALSHA and INFO
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(redis.Redis, "_execute_command", counting)
        yield found
