"""Gives an end to records of batches that ended before records had one."""

from __future__ import annotations

from itertools import chain

from contract.redis.objects import Kind, Stored
from gateway.batches.api.record import BatchRecord, decode, encode, end_of_record
from gateway.http.services import Services

#: Records read in one round trip.
_PAGE = 100
#: Lists that name batches: those of Anthropic's API are in the second alone.
_LISTS: tuple[Kind, ...] = ("batch", "message_batch")


def end_older_records(services: Services, tenant: str) -> int:
    """Count a tenant's records that are not counted yet, and end those of ended batches.

    Only records that an earlier version has written are looked at: what this one writes is counted.

    Returns:
        How many got an end.
    """
    known = {record.id for record in services.records.of(tenant) if record.kind == "batch"}
    lists = (services.records.listed(kind, tenant) for kind in _LISTS)
    listed = dict.fromkeys(chain.from_iterable(lists))
    unknown = [name for name in listed if name not in known]
    count = 0
    for begin in range(0, len(unknown), _PAGE):
        ids = unknown[begin : begin + _PAGE]
        for stored in services.objects.several("batch", ids):
            if stored is not None:
                count += _end(services, tenant, stored)
    return count


def _end(services: Services, tenant: str, stored: Stored) -> bool:
    """Write a record back as it was read, with its end; whoever carries it reads it again."""
    record: BatchRecord = decode(stored.document)
    ends_at = end_of_record(record)
    written = services.objects.replace(
        "batch", tenant, stored, encode(record), record.created_at, ends_at
    )
    if written is None or ends_at is None:
        return False
    if record.api == "anthropic":
        services.records.end("message_batch", record.id, ends_at)
    return True
