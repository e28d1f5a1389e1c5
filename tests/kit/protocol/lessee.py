"""Builders for tests: batches, messages, and one worker's side of the lease protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import redis

from contract import naming
from contract.batch import Batch
from contract.errors import RequestFailed
from contract.index import IndexChunk
from contract.message import Delivery, MessageWriter, read_delivery
from contract.openai.amounts import sequences_of
from contract.openai.body import CHAT_URL
from contract.redis import keys
from contract.redis.batches import BatchStore
from contract.redis.scripts import source
from contract.results import failure_meta, success_meta
from contract.version import PROTOCOL

QUEUE = naming.DEFAULT_QUEUE
SEED = "00" * 20
DATE = "2026-11-20T00:00:00+00:00"
#: What `done` adds to an answer that was cut off at its limit of tokens.
CUT = b',"choices":[{"finish_reason":"length"}]'
LIMITS = {"high_water": 0.6, "high_water_requests": 1_000_000}


def chat(text: str = "Hello", **fields: Any) -> dict[str, Any]:
    """Return a small chat body."""
    return {"messages": [{"role": "user", "content": text}], **fields}


@dataclass(frozen=True, slots=True)
class Submitted:
    """A batch as `submit_batch` left it."""

    batch: Batch
    ids: list[str]
    list_key: str
    end: tuple[int, str]

    @property
    def id(self) -> str:
        """The batch id."""
        return self.batch.id


def writer(
    batch: Batch, queue: str = QUEUE, priority: int = 6, deadline: float | None = None
) -> MessageWriter:
    """Return the writer of a batch's messages; `deadline` is in seconds since the epoch."""
    return MessageWriter(batch.id, int(batch.created), batch.life, queue, priority, deadline)


def submit_batch(
    store: BatchStore,
    count: int = 3,
    *,
    batch_id: str = "b1",
    queue: str = QUEUE,
    priority: int = 6,
    tenant: str = naming.DEFAULT_TENANT,
    fifo: bool = False,
    seal: bool = True,
    bodies: Sequence[dict[str, Any]] = (),
    run: str = "",
    deadline: str = "",
) -> Submitted:
    """Queue `count` chat requests c1, c2, ... as one batch of one chunk, or as a run's window."""
    list_key = naming.turn_list(queue, priority, tenant, "" if fifo else run or batch_id)
    fields: dict[str, str | int] = {"queue": queue, "tenant": tenant, "list": list_key}
    _, batch = store.create(batch_id, SEED, fields, deadline=deadline)
    ends_at = batch.number("deadline") / 1000 or None
    write = writer(batch, queue, priority, ends_at)
    bodies = bodies or [chat(f"question {line}") for line in range(1, count + 1)]
    entries = [(line, f"c{line}", False) for line in range(1, len(bodies) + 1)]
    end = (len(bodies), f"{len(bodies):040x}")
    chunk = IndexChunk(*end, entries)
    ids = chunk.request_ids(batch_id)
    messages = [
        write.write(rid, custom_id, line, CHAT_URL, orjson.dumps(body), sequences_of(body))
        for rid, (line, custom_id, _), body in zip(ids, entries, bodies, strict=True)
    ]
    answer = store.enqueue(batch, list_key, (0, SEED), chunk, messages, [], **LIMITS)
    assert answer.answer == "ok", answer
    if seal:
        assert store.seal(batch, end).answer == "ok"
    return Submitted(batch, ids, list_key, end)


def one_more(submitted: Submitted, line: int) -> tuple[IndexChunk, list[bytes]]:
    """Return a chunk of one line that follows what was submitted."""
    chunk = IndexChunk(line, f"{line:040x}", [(line, f"c{line}", False)])
    (rid,) = chunk.request_ids(submitted.id)
    message = writer(submitted.batch).write(rid, f"c{line}", line, CHAT_URL, orjson.dumps(chat()))
    return chunk, [message]


def celery_message(request_id: str, body: object = None, **headers: Any) -> bytes:
    """Return a protocol-2 message as a plain Celery client writes it; headers may be hostile."""
    args = orjson.dumps([[chat() if body is None else body], {}, {}]).decode()
    return orjson.dumps({
        "body": args,
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "headers": {"id": request_id, "task": naming.TASK_NAME} | headers,
        "properties": {
            "delivery_tag": request_id, "delivery_info": {"exchange": "", "routing_key": QUEUE},
            "priority": 0, "body_encoding": "utf-8",
        },
    })  # fmt: skip


def life_of(delivery: Delivery) -> str | int:
    """Return what DONE is told: the batch's life, or how long the result of none is kept."""
    return delivery.life if delivery.batch else delivery.keep_ms or ""


@dataclass(frozen=True, slots=True)
class Lease:
    """One message as POP handed it out."""

    id: str
    returns: int
    deaths: int
    message: bytes

    @property
    def request_id(self) -> str:
        """The Celery task id."""
        return str(orjson.loads(self.message)["headers"]["id"])


class Lessee:
    """One worker's side of the lease protocol, script by script; no retries, no engine."""

    def __init__(self, client: redis.Redis, worker: str = "w1", queue: str = QUEUE) -> None:
        self.client = client
        self.worker = worker
        self.queue = queue
        self.head: list[Any] = []
        self.requeued_at: list[int] = []
        self.turn: list[Any] = ["", 0]
        self.ttl_ms = 60_000

    def run(self, name: str, *args: Any) -> Any:
        """Run one script."""
        return self.client.register_script(source(name))(args=args)

    def pop(
        self,
        k: int = 100,
        *,
        max_bytes: int = 2**26,
        lease_ms: int = 60_000,
        slots: int = 64,
        lists: Sequence[str] = (),
        floor: int = 0,
        most_multi: int = 1000,
        context: int = 0,
        excluded: Sequence[str] = (),
        urgent: Sequence[str] = (),
    ) -> list[Lease]:
        """Lease up to k messages; the reply's first seven values stay in `head`."""
        named = lists or (["", *urgent] if urgent else ())
        reply = self.run(
            "pop", self.worker, self.queue, k, max_bytes, lease_ms, slots, self.ttl_ms, DATE,
            floor, *self.turn, most_multi, context, "".join(f"{t}\6" for t in excluded), *named,
        )  # fmt: skip
        self.head = reply[:7]
        self.turn = reply[5:7]
        self.requeued_at = [int(at or 0) for at in reply[12::6]]
        return [
            Lease(reply[i].decode(), int(reply[i + 1]), int(reply[i + 2]), reply[i + 3])
            for i in range(7, len(reply), 6)
        ]

    def remove_ended(self, *lists: str) -> None:
        """Remove the messages before the first one that may run, from each of these lists."""
        turn = self.turn
        assert self.pop(0, lists=lists) == []
        self.turn = turn

    def done(
        self, *leases: Lease, outcome: str = "completed", keep: bool = False, cut: bool = False
    ) -> int:
        """End leases with one outcome; return how many results were written."""
        args: list[Any] = []
        for lease in leases:
            delivery = read_delivery(lease.id, lease.message)
            if outcome == "completed":
                body = b'{"by":"%s"%s}' % (self.worker.encode(), CUT if cut else b"")
                meta = success_meta(delivery, body, {"life": delivery.life})
            else:
                revoked = outcome in ("cancelled", "expired")
                error = RequestFailed(f"by {self.worker}", code=outcome if revoked else None)
                meta = failure_meta(
                    delivery.request_id, error, batch=delivery.batch, revoked=revoked
                )
            args += [
                lease.id, delivery.request_id, delivery.batch, life_of(delivery), outcome,
                "cut" if cut else int(keep), 2, 3, meta,
            ]  # fmt: skip
        return int(self.run("done", self.worker, self.ttl_ms, *args))

    def release(self, *leases: Lease, died: Sequence[Lease] = (), max_deaths: int = 2) -> int:
        """Hand leases back; POP's order is oldest first, RELEASE wants newest first."""
        pairs: list[Any] = []
        for lease in reversed(leases):
            pairs += [lease.id, int(lease in died)]
        common = (self.worker, max_deaths, self.ttl_ms, DATE)
        count, left = self.run("release", *common, *pairs)
        while left:
            _, left = self.run("release", *common)
        return int(count)

    def renew(self, *lease_ids: str, lease_ms: int = 60_000) -> tuple[list[str], list[str]]:
        """Prolong leases; return (lost, unknown)."""
        lost, unknown = self.run("renew", self.worker, lease_ms, *lease_ids)
        return [raw.decode() for raw in lost], [raw.decode() for raw in unknown]

    def sweep(self, *, lease_ms: int = 60_000, max_deaths: int = 2, limit: int = 500) -> int:
        """Put expired leases back."""
        announcement = orjson.dumps({"state": "ready", "queue": self.queue, "protocol": PROTOCOL})
        args = (lease_ms, max_deaths, self.ttl_ms, DATE, limit, self.worker, announcement)
        return int(self.run("sweep", *args, self.queue))

    def bury(self, lease: Lease, reason: str) -> int:
        """Make a leased message a dead letter."""
        return int(self.run("bury", self.worker, lease.id, reason, self.ttl_ms, DATE))

    def expire_leases(self, *leases: Lease) -> None:
        """Let leases run out now, and sweeping be allowed at once."""
        for lease in leases:
            self.client.zadd(keys.LEASES, {lease.id: 1})
        self.allow_sweep()

    def allow_sweep(self) -> None:
        """Make it look as if somebody had swept just now, with no hold."""
        seconds, micros = self.client.time()
        now = seconds * 1000 + micros // 1000
        self.client.hset(keys.SWEEP, mapping={"last": now, "hold": 0})


def bury_alive(client: redis.Redis, message: bytes, reason: bytes = b"poison") -> str:
    """Make a dead letter of a plain request's message; return its id."""
    request_id = orjson.loads(message)["headers"]["id"].encode()
    fields = (b"1", b"%d" % len(message), QUEUE.encode(), request_id, b"", b"", b"null", reason)
    client.hset(keys.DEAD, "1", b"\0".join(fields))
    client.lpush(keys.dead_key("1"), message)
    return "1"


def client_of(store: BatchStore) -> redis.Redis:
    """Return redis-py's own client of a store, to look at any key and at Redis itself."""
    return store._raw_client


def dead_messages(store: BatchStore) -> list[bytes]:
    """Return the messages of all dead letters, oldest first."""
    return [store.dead_message(letter["id"]) for letter in store.dead_letters()]


def queued_ids(client: redis.Redis, list_key: str) -> list[str]:
    """Return the request ids of a list, next to be popped first."""
    return [orjson.loads(raw)["headers"]["id"] for raw in reversed(client.lrange(list_key, 0, -1))]


def stored(client: redis.Redis, request_id: str) -> dict[str, Any] | None:
    """Return the stored result of a request."""
    raw = client.get(keys.result_key(request_id))
    return orjson.loads(raw) if raw is not None else None


def result_of(client: redis.Redis, request_id: str) -> dict[str, Any]:
    """Return the stored result of a request that has one."""
    meta = stored(client, request_id)
    assert meta is not None, request_id
    return meta


def now(store: BatchStore, batch_id: str = "b1") -> Batch:
    """Return the batch as it is now."""
    batch = store.batch(batch_id)
    assert batch is not None
    return batch


def counts(batch: Batch) -> dict[str, int]:
    """Return the counters that are not zero."""
    names = ("completed", "failed", "cancelled", "expired")
    return {name: batch.number(name) for name in names if batch.number(name)}
