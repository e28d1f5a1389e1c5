"""Do tenants get their shares of tokens, how soon is a newcomer served, do slots stay full?

The simulated engine, whose requests take time in proportion to their tokens (priced.py): nothing
here is a model's speed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import redis
from bench.common import report
from bench.common.load import CHUNK, wait_ready

from contract import naming
from contract.index import IndexChunk
from contract.message import MessageWriter
from contract.openai.body import COMPLETION_URL
from contract.redis import keys
from contract.redis.batches import BatchStore
from contract.redis.tenants import Tenant
from demo.stack import RedisServer, environment_of, eventually

SLOTS = 64
#: Seconds a token takes in a slot.
TOKEN_S = 0.002
#: Tokens of a request where all are alike; it takes 0.2 s.
TOKENS = 100
#: Weight of each tenant, and the tokens of its requests.
WEIGHTS = {"one": (1, 300), "two": (2, 30), "four": (4, 100)}
WINDOW = 10_000
TITLE = "turns of tenants, simulated engine"
EXPECTED = {
    "written": "before the first run",
    "late_share": 0.5,
    "late_first_answer_in_mean_requests": 1.5,
    "occupancy": 0.998,
    "worst_share_error": 0.02,
    "why": "turns of 32 requests take turns exactly; a quarter of the slots is look-ahead, which "
    "the newcomer waits for, and then for its own answer; a window has ten turns of the longest",
}
BARS = {
    "late_share_error": 0.02,
    "late_first_answer_in_mean_requests": 2,
    "occupancy": 0.99,
    "worst_share_error": 0.03,
}


@dataclass(frozen=True, slots=True)
class Served:
    """One request as the engine ran it: whose, when in seconds, how many tokens."""

    tenant: str
    begun: float
    ended: float
    tokens: int


def queue(client: redis.Redis, tenant: str, count: int, tokens: int) -> None:
    """Queue a tenant's batch as the producer does."""
    store = BatchStore(client, ttl_ms=3_600_000)
    name = naming.DEFAULT_QUEUE
    list_key = naming.turn_list(name, 6, tenant, tenant)
    _, batch = store.create(tenant, "", {"queue": name, "tenant": tenant, "list": list_key})
    writer = MessageWriter(batch.id, int(batch.created), batch.life, name, 6)
    end = (0, "")
    for start in range(0, count, CHUNK):
        numbers = range(start + 1, min(start + CHUNK, count) + 1)
        body = orjson.dumps({"prompt": tenant, "max_tokens": tokens})
        messages = [
            writer.write(
                naming.request_id(batch.id, f"r{n}"), f"r{n}", n, COMPLETION_URL, body
            )
            for n in numbers
        ]  # fmt: skip
        chunk = IndexChunk(numbers[-1], f"d{numbers[-1]}", [(n, f"r{n}", False) for n in numbers])
        answer = store.enqueue(
            batch, list_key, end, chunk, messages, [], high_water=0.9, high_water_requests=10**7
        )
        assert answer.answer == "ok", answer
        end = (chunk.cursor, chunk.digest)
    store.seal(batch, end)


@contextmanager
def worker(url: str, trace: Path, token_s: float) -> Iterator[None]:
    """Run the drain beside this process."""
    settings = {"redis_url": url, "engine": "simulated", "simulated_slots": SLOTS}
    env = environment_of(settings | {"simulated_latency_s": token_s})
    program = Path(__file__).with_name("priced.py")
    process = subprocess.Popen([sys.executable, program, trace], env=env)
    try:
        yield
    finally:
        process.terminate()
        assert process.wait(30) == 0


def read(trace: Path) -> list[Served]:
    """Return what was served, in the order in which it began."""
    found = []
    for line in trace.read_text().splitlines():
        tenant, begun, ended, tokens = line.split()
        found.append(Served(tenant, float(begun), float(ended), int(tokens)))
    return sorted(found, key=lambda served: served.begun)


def occupancy(served: Sequence[Served], begin: float, end: float) -> float:
    """Return the share of slot-seconds used between two moments."""
    used = sum(max(0.0, min(s.ended, end) - max(s.begun, begin)) for s in served)
    return used / (SLOTS * (end - begin))


def late(folder: Path, early: int, coming: int) -> dict[str, float]:
    """Return what a tenant gets that comes when another one has filled the queue."""
    trace = folder / "trace"
    with RedisServer(folder / "redis") as server, server.client() as client:
        queue(client, "early", early, TOKENS)
        with worker(server.url, trace, TOKEN_S):
            wait_ready(client)
            early_key, late_key = keys.batch_key("early"), keys.batch_key("late")
            eventually(lambda: int(client.hget(early_key, "completed") or 0) > 1000, 60)
            at = time.monotonic()
            queue(client, "late", coming, TOKENS)
            eventually(lambda: client.hexists(late_key, "finished_at"), 300)
    served = read(trace)
    mine = [s for s in served if s.tenant == "late"]
    first, last = mine[0].begun, mine[-1].begun
    during = [s for s in served if first <= s.begun <= last]
    share = sum(s.tokens for s in mine) / sum(s.tokens for s in during)
    mean_s = sum(s.ended - s.begun for s in during) / len(during)
    return {
        "late_share": share,
        "late_share_error": abs(share - 0.5),
        "late_first_answer_in_mean_requests": (min(s.ended for s in mine) - at) / mean_s,
        "occupancy": occupancy(served, at, last),
    }


def weights(folder: Path, each_s: float) -> dict[str, Any]:
    """Return how far the shares of three tenants are from their weights, over every window."""
    trace, token_s = folder / "trace", 0.0005
    total = sum(weight for weight, _ in WEIGHTS.values())
    per_s = SLOTS / token_s
    with RedisServer(folder / "redis") as server, server.client() as client:
        store = BatchStore(client, ttl_ms=60_000)
        for name, (weight, tokens) in WEIGHTS.items():
            store.set_tenant(Tenant(name, weight))
            queue(client, name, int(1.3 * each_s * per_s * weight / total / tokens), tokens)
        with worker(server.url, trace, token_s):
            wait_ready(client)
            eventually(
                lambda: any(
                    client.hexists(f"warmq:batch:{name}", "finished_at") for name in WEIGHTS
                ),
                10 * each_s,
            )
    served = sorted(read(trace), key=lambda s: s.ended)
    # While all three have requests waiting: what is in flight at the end of the first is its last.
    ends = [max(s.begun for s in served if s.tenant == name) for name in WEIGHTS]
    served = served[: bisect_left([s.ended for s in served], min(ends))]
    errors: dict[str, float] = defaultdict(float)
    for start in range(0, len(served) - WINDOW, 250):
        window = served[start : start + WINDOW]
        used = sum(s.tokens for s in window)
        for name, (weight, _) in WEIGHTS.items():
            share = sum(s.tokens for s in window if s.tenant == name) / used
            errors[name] = max(errors[name], abs(share - weight / total))
    assert errors, f"{len(served)} requests are less than a window"
    return {"requests": len(served), "errors": errors, "worst_share_error": max(errors.values())}


def measure(quick: bool) -> dict[str, Any]:
    """Return the part's figures."""
    repeats = 1 if quick else 3
    lates, shares = [], []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="warmq-bench-") as name:
            lates.append(late(Path(name), 10_000 if quick else 100_000, 1_000))
        with tempfile.TemporaryDirectory(prefix="warmq-bench-") as name:
            shares.append(weights(Path(name), 12 if quick else 25))
    reached = {key: report.spread([one[key] for one in lates], 4) for key in lates[0]}
    reached["worst_share_error"] = report.spread([s["worst_share_error"] for s in shares], 4)
    return {
        "slots": SLOTS,
        "late": lates, "weights": shares, "reached": reached,
    }  # fmt: skip
