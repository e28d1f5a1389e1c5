"""Begins and ends the carrying of batches, so that no crash between two steps loses one."""

from __future__ import annotations

import msgspec

from gateway.batches.api.record import ENDED, BatchRecord, decode, encode
from gateway.files.objects import Files
from gateway.http.services import Services
from gateway.http.traced import current_traceparent

#: Whoever carries batches looks for a new one at the latest after so long, also if the gateway that
#: was to ask for it died just before. It finds nothing if the batch itself was not written either.
_LOOK_MS = 10_000
#: And for what a create has noted before it wrote the batch. It is longer than any try of a create
#: waits for Redis.
_NOTED_MS = 60_000


def announce_batch(services: Services, batch_id: str) -> None:
    """Say that something is about to be noted for a batch that is not written yet.

    If it never is, whoever carries batches calls `forget_batch`.
    """
    services.due.add("batch", batch_id, _NOTED_MS)


def forget_batch(services: Services, batch_id: str) -> None:
    """Remove what was noted for a batch that is not there."""
    services.limits.give_back(batch_id)
    owner = services.objects.owner_of("message_batch", batch_id)
    if owner is not None:
        services.objects.delete("message_batch", owner, batch_id)


def start_batch(services: Services, record: BatchRecord) -> bool:
    """Write a new batch and ask for it to be carried; return False if there is one of its id."""
    record = msgspec.structs.replace(record, traceparent=current_traceparent())
    services.due.add("batch", record.id, _LOOK_MS)
    Files(services).keep_content(record.input_file_id, record.id)
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
        at = record.changed_at | {"cancelling": int(services.clock.now())}
        anew = msgspec.structs.replace(record, status="cancelling", changed_at=at)
        if services.objects.replace("batch", tenant, read, encode(anew), record.created_at):
            services.due.add("batch", batch_id)
            return anew
    return None
