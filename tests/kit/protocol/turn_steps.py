"""Steps of a worker whose requests cost what a test says, and whose turn it was."""

from __future__ import annotations

from collections.abc import Sequence

import orjson
import redis
from kit.protocol.lessee import QUEUE, Lease, Lessee

from contract import naming
from contract.errors import RequestFailed
from contract.message import read_delivery
from contract.results import failure_meta, success_meta


def batches_of(leases: Sequence[Lease]) -> list[str]:
    """Return the batch of each lease, in the order in which they were popped."""
    return [
        orjson.loads(lease.message)["headers"].get("warmq", {}).get("batch", "") for lease in leases
    ]


def by_batch(leases: Sequence[Lease]) -> dict[str, list[Lease]]:
    """Return the leases of each batch."""
    found: dict[str, list[Lease]] = {}
    for lease, batch in zip(leases, batches_of(leases), strict=True):
        found.setdefault(batch, []).append(lease)
    return found


def report(worker: Lessee, leases: Sequence[Lease], prompt: int, completion: int) -> None:
    """Complete leases, each with these numbers of tokens."""
    report_each(worker, leases, [prompt + completion] * len(leases))


def report_each(worker: Lessee, leases: Sequence[Lease], tokens: Sequence[int]) -> None:
    """Complete leases in one DONE, each with a number of tokens of its own."""
    args: list[object] = []
    for lease, used in zip(leases, tokens, strict=True):
        d = read_delivery(lease.id, lease.message)
        meta = success_meta(d, b"{}", {})
        args += [lease.id, d.request_id, d.batch, d.life, "completed", 0, used, 0, meta]
    if args:
        worker.run("done", worker.worker, worker.ttl_ms, *args)


def end(worker: Lessee, leases: Sequence[Lease], outcome: str, *, keep: bool) -> None:
    """End leases without an answer, as worker/drain/serve.py does: it knows of no tokens."""
    args: list[object] = []
    for lease in leases:
        d = read_delivery(lease.id, lease.message)
        error = RequestFailed("no answer", code=outcome)
        meta = failure_meta(d.request_id, error, batch=d.batch, revoked=outcome != "failed")
        args += [lease.id, d.request_id, d.batch, d.life, outcome, int(keep), 0, 0, meta]
    if args:
        worker.run("done", worker.worker, worker.ttl_ms, *args)


def score(client: redis.Redis, tenant: str, step: int = 6) -> float:
    """Return a tenant's counter, whether it waits or has left."""
    ring = naming.turns_key(QUEUE, step)
    found = client.zscore(ring, tenant)
    return float((found if found is not None else client.zscore(f"{ring}:left", tenant)) or 0)
