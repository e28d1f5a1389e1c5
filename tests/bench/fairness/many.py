"""What a POP costs Redis with 1,000 tenants of 100 batches each, beside one tenant with one batch.

Both have the same messages and the same POPs of 32; Redis' own clock (`commandstats`).
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import redis
from bench.common import report
from kit.protocol.lessee import QUEUE, SEED, Lessee, writer

from contract import naming
from contract.batch import Batch
from contract.openai.body import COMPLETION_URL
from contract.redis import keys
from demo.stack import RedisServer

TENANTS, BATCHES = 1000, 100
#: Messages of a batch: more than a turn, so that a POP is one run of neighbours.
EACH = 33
POPS, RUN = 1000, 32
TITLE = f"a POP of {RUN}: many tenants of many batches, and one of one"
EXPECTED = {
    "written": "before the first run",
    "many_to_one": 1.1,
    "why": "a POP makes some ten more commands for its turn, whoever's it is; the ring of 1,000 "
    "and the lists of 100 are skip lists",
}
BARS = {"many_to_one": 1.2}


def fill(client: redis.Redis, tenants: int, batches: int, each: int) -> None:
    """Queue batches as ENQUEUE leaves them, without an index; messages of a batch are alike."""
    ring = naming.turns_key(QUEUE, 6)
    for tenant in (f"t{n}" for n in range(tenants)):
        pipe = client.pipeline(transaction=False)
        for name in (f"{tenant}-b{n}" for n in range(batches)):
            batch = Batch(name, {"created_at": "1", "life": "life.1"})
            message = writer(batch).write(name, "c", 1, COMPLETION_URL, b'{"prompt":"x"}')
            list_key = naming.turn_list(QUEUE, 6, tenant, name)
            state = {"life": "life.1", "created_at": 1, "digest": SEED, "list": list_key}
            pipe.hset(keys.batch_key(name), mapping=state)
            for start in range(0, each, 5000):
                pipe.lpush(list_key, *[message] * min(5000, each - start))
            pipe.zadd(f"{ring}\x06{tenant}", {list_key: 0})
        pipe.zadd(ring, {tenant: 0})
        pipe.execute()


def pop_us(folder: Path, tenants: int, batches: int, each: int, pops: int) -> float:
    """Return the microseconds of Redis' time that a POP of 32 takes."""
    with RedisServer(folder, "--appendonly", "no") as server, server.client() as client:
        fill(client, tenants, batches, each)
        worker = Lessee(client)
        worker.pop(1)  # the script is loaded
        client.config_resetstat()
        for _ in range(pops):
            assert len(worker.pop(RUN, slots=256)) == RUN
        stats = client.info("commandstats")["cmdstat_evalsha"]
    return float(stats["usec"]) / pops


def measure(quick: bool) -> dict[str, Any]:
    """Return the part's figures."""
    tenants, batches = (100, 20) if quick else (TENANTS, BATCHES)
    pops = 300 if quick else POPS
    found = []
    for _ in range(2 if quick else 5):
        with tempfile.TemporaryDirectory(prefix="warmq-bench-") as name:
            many = pop_us(Path(name) / "many", tenants, batches, EACH, pops)
            one = pop_us(Path(name) / "one", 1, 1, (pops + 1) * RUN, pops)
        found.append({"many_us": many, "one_us": one, "many_to_one": many / one})
    return {
        "tenants": tenants, "batches_each": batches,
        "reached": {key: report.spread([one[key] for one in found]) for key in found[0]},
    }  # fmt: skip
