"""Begins and ends the carrying of batches, so that no crash between two steps loses one."""

from __future__ import annotations

import time

import msgspec

from producer.gateway.batches.record import ENDED, BatchRecord, decode, encode
from producer.gateway.services import Services

#: Whoever carries batches looks for a new one at the latest after so long, also if the gateway that
#: was to ask for it died just before. It finds nothing if the batch itself was not written either.
_LOOK_MS = 10_000


def start_batch(services: Services, record: BatchRecord) -> bool:
    """Write a new batch and ask for it to be carried; return False if there is one of its id."""
    services.due.add("batch", record.id, _LOOK_MS)
    new = services.objects.create(
        "batch", record.tenant, record.id, record.created_at, encode(record)
    )
    services.due.add("batch", record.id)
    return new


def request_cancel(services: Services, tenant: str, batch_id: str) -> BatchRecord | None:
    """Note that a batch is to be cancelled, and ask for it to be done.

    Returns:
        It as it is now; None if the tenant has none of that id.
    """
    while (read := services.objects.get("batch", tenant, batch_id)) is not None:
        record = decode(read.document)
        if record.status in ENDED or record.status == "cancelling":
            return record
        at = record.changed_at | {"cancelling": int(time.time())}
        anew = msgspec.structs.replace(record, status="cancelling", changed_at=at)
        if services.objects.replace("batch", tenant, read, encode(anew), record.created_at):
            services.due.add("batch", batch_id)
            return anew
    return None
