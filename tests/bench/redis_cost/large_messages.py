"""How long scripts hold Redis up with 1,000 messages of 1 MB in flight, of four workers.

The messages differ in their last bytes only (a shared text or image): what is worst for Lua, whose
strings of one length and one end are compared with each other.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import orjson
import redis
from bench.common import report
from bench.redis_cost.redis_times import Watch
from kit.protocol.lessee import LIMITS, SEED, Lease, Lessee, chat, writer

from contract import naming
from contract.index import IndexChunk
from contract.openai.body import CHAT_URL
from contract.redis import keys
from contract.redis.batches import BatchStore
from demo.stack import RedisServer
from producer.input.reader import CHUNK_BYTES
from worker.drain.committer import GROUP
from worker.drain.leases import POP_BYTES

WORKERS, SIZE = 4, 1_000_000
TITLE = "slowest script with many messages of 1 MB"
EXPECTED = {
    "written": "before the first run",
    "slowest_ms": 30,
    "bar": "no script above 50 ms",
    "why": "4 MB a script, copied five times at 1 GB/s; page faults of what is copied",
}


def submit(store: BatchStore, batch_id: str, count: int) -> None:
    """Queue a batch in chunks as large as `producer submit` sends."""
    list_key = naming.turn_list("warmq", 6, "default", batch_id)
    _, batch = store.create(batch_id, SEED, {"queue": "warmq", "list": list_key})
    write, end = writer(batch), (0, SEED)
    step = -(-CHUNK_BYTES // SIZE)
    for first in range(1, count + 1, step):
        lines = range(first, min(first + step, count + 1))
        chunk = IndexChunk(lines[-1], f"{lines[-1]:040x}", [(n, f"c{n}", False) for n in lines])
        messages = [
            write.write(rid, f"c{n}", n, CHAT_URL, orjson.dumps(chat("x" * SIZE + f"{n:06d}")))
            for rid, n in zip(chunk.request_ids(batch_id), lines, strict=True)
        ]
        assert store.enqueue(batch, list_key, end, chunk, messages, [], **LIMITS).answer == "ok"
        end = (chunk.cursor, chunk.digest)
    store.seal(batch, end)


def lease(worker: Lessee, count: int) -> list[Lease]:
    """POP until the worker has so many."""
    held: list[Lease] = []
    while len(held) < count:
        held += worker.pop(count - len(held), max_bytes=POP_BYTES)
    return held


def phases(client: redis.Redis, watch: Watch, each: int) -> None:
    """Take every message through every script that moves it."""
    store = BatchStore(client, ttl_ms=60_000)
    workers = [Lessee(client, f"w{n}") for n in range(WORKERS)]
    for n in range(WORKERS):
        submit(store, f"b{n}", each)
    watch.keep("submit")
    held = {worker.worker: lease(worker, each) for worker in workers}
    watch.keep("lease")
    first, *rest = workers
    first.release(*held[first.worker])
    watch.keep("release")
    held[first.worker] = lease(first, each)
    watch.forget()
    for worker in rest:
        worker.expire_leases(*held[worker.worker])
    while client.zcount(keys.LEASES, "-inf", 1):
        first.allow_sweep()
        first.sweep()
    watch.keep("sweep")
    for at in range(0, each, GROUP):
        first.done(*held[first.worker][at : at + GROUP], outcome="failed", keep=True)
    watch.keep("fail")
    for n in range(WORKERS):
        batch = store.batch(f"b{n}")
        assert batch is not None
        store.retry(batch, ["failed"])
    watch.keep("retry")
    for n in range(WORKERS):
        store.delete(f"b{n}", force=True)
    watch.keep("delete")


def measure(quick: bool) -> dict[str, Any]:
    """Return the part's figures."""
    each = 50 if quick else 250
    with (
        tempfile.TemporaryDirectory(prefix="warmq-bench-") as name,
        RedisServer(Path(name) / "redis") as server,
        server.client() as client,
    ):
        watch = Watch(client)
        phases(client, watch, each)
    slowest = {phase: watch.slowest(phase) for phase in watch.found}
    return {
        "messages": WORKERS * each, "bytes_each": SIZE,
        "phases": watch.found,
        "reached": {"slowest_ms": report.spread(list(slowest.values()), 2)}
        | {f"{phase}_slowest_ms": report.spread([worst], 2) for phase, worst in slowest.items()},
    }  # fmt: skip
