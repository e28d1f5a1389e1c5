"""What tenants of gateways keep in Redis, as an operator sees and removes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from contract.errors import BatchConflict
from contract.redis.batches import BatchStore
from contract.redis.due import Due
from contract.redis.objects import Kind, Objects
from contract.redis.reads import Reads
from contract.redis.records import Record, Records

#: Records looked at to say which kinds a tenant has: a bound on what the doctor asks of Redis.
SAMPLED = 1000
#: A file's content goes so long after its record: a batch may still read it.
CONTENT_MS = 600_000
_ENDED = frozenset(("completed", "failed", "expired", "cancelled"))


@dataclass(frozen=True, slots=True)
class Held:
    """What one tenant has: bytes in all, and how many of each kind, the most frequent first.

    With `sampled` the kinds are those of SAMPLED records only.
    """

    tenant: str
    bytes: int
    kinds: dict[str, int]
    sampled: bool


def held_by_tenants(redis: Reads) -> Iterator[Held]:
    """Yield what each tenant has, the largest first."""
    records = Records.beside(redis)
    for tenant, held in sorted(records.owners().items(), key=lambda pair: -pair[1]):
        kinds = records.kinds_of(tenant, SAMPLED)
        yield Held(tenant, held, dict(kinds.most_common()), kinds.total() >= SAMPLED)


def records_of(redis: Reads, tenant: str) -> Iterator[Record]:
    """Yield a tenant's records in no order."""
    return Records.beside(redis).of(tenant)


def delete_record(redis: BatchStore, object_id: str) -> Kind | None:
    """Remove a tenant's batch that has ended, with its results, or a file, whose content a gateway
    then removes.

    Returns:
        What it was; None if there is no such object.

    Raises:
        BatchConflict: it is a batch that has not ended.
    """
    objects, kind = Objects.beside(redis), _kind_of(object_id)
    owner = objects.owner_of(kind, object_id) if kind is not None else None
    if kind is None or owner is None:
        return None
    parts: list[str] = []
    if kind == "file":
        Due.beside(redis).add("file", object_id, CONTENT_MS)  # first: else its content would stay
    else:
        stored = objects.get(kind, owner, object_id)
        record = orjson.loads(stored.document) if stored else {}
        status, parts = record.get("status", "validating"), _parts(record)
        if stored is not None and status not in _ENDED:
            raise BatchConflict(
                f"batch {object_id} of tenant {owner} is {status}; its tenant must cancel it first"
            )
    for batch_id in parts:  # first: killed in between, the same call ends it
        redis.delete(batch_id, force=True)
    objects.delete(kind, owner, object_id)
    return kind


def _parts(record: dict[str, Any]) -> list[str]:
    """Return the queues' batches of a gateway's batch."""
    return [part["batch_id"] for part in record.get("parts", ())]


def _kind_of(object_id: str) -> Kind | None:
    if object_id.startswith("file-"):
        return "file"
    return "batch" if object_id.startswith(("batch_", "msgbatch_")) else None
