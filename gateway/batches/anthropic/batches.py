"""What can be done to message batches: make, find, list, cancel, delete.

A batch is a BatchRecord like any. Beside it stands an object of the kind `message_batch`: their
own list, which pages both ways, and once a batch has ended how its failures have.
"""

from __future__ import annotations

import hashlib

import msgspec

from contract.redis.objects import Kind, Stored
from gateway.batches.anthropic.protocol import (
    ENDPOINT,
    KEPT_S,
    PREFIX,
    WINDOW_S,
    MessageBatch,
    MessageBatchList,
    Split,
    shown,
    split_in,
)
from gateway.batches.anthropic.results import count
from gateway.batches.api.create import DEFAULT_PRIORITY
from gateway.batches.api.record import ENDED, BatchRecord, Counts, decode, end_of_record
from gateway.batches.api.starting import announce_batch, request_cancel, start_batch
from gateway.files.keeping import check_same
from gateway.files.objects import FileRecord, Files
from gateway.http.caller import Caller
from gateway.http.errors import ApiError, invalid, not_found
from gateway.http.http import new_id
from gateway.http.idempotency import conflict
from gateway.http.limits import estimated_tokens
from gateway.http.services import Services
from gateway.store import Writer

_KIND: Kind = "message_batch"
_encode = msgspec.json.Encoder().encode


def ids(caller: Caller, idempotency: str) -> tuple[str, str]:
    """Return the ids of a new batch and its input file: the same for each try of a create."""
    if not idempotency:
        return new_id(PREFIX), new_id("file-")
    name = f"{PREFIX}\0{caller.tenant}\0{idempotency}"
    digest = hashlib.sha256(name.encode()).hexdigest()[:24]
    return PREFIX + digest, "file-" + digest


def create(
    services: Services, caller: Caller, batch_id: str, writer: Writer, file: FileRecord, total: int
) -> BatchRecord:
    """Keep the input file that was written, and ask for the batch to be carried; or find the batch
    that the same create has made before.

    Raises:
        ApiError: 409, another create had its Idempotency-Key; 429 over a quota.
    """
    files = Files(services)
    if known := files.get(caller.tenant, file.id):
        check_same(known, file)
    stored = services.objects.get("batch", caller.tenant, batch_id)
    if stored is not None:
        record = decode(stored.document)
        if known is None:  # its file was deleted: nothing tells what it was
            raise conflict()
        return record
    files.announce(file.id)  # first: nothing may lie in the store, or count, that nobody knows of
    services.limits.check_records(caller)
    announce_batch(services, batch_id)
    services.limits.reserve(caller, batch_id, {"": estimated_tokens(file.bytes)})
    services.limits.note_bytes(caller, file.id, file.bytes)
    writer.commit()
    files.create(file)
    now = int(services.clock.now())
    record = BatchRecord(
        id=batch_id, tenant=caller.tenant, key_id=caller.key_id, api="anthropic",
        endpoint=ENDPOINT, input_file_id=file.id, completion_window="24h", created_at=now,
        expires_at=now + WINDOW_S, changed_at={"validating": now}, output_expires_after_s=KEPT_S,
        priority=max(DEFAULT_PRIORITY, caller.highest_priority), counts=Counts(total=total),
    )  # fmt: skip
    # Into the list first: it must be there as soon as it can be carried.
    services.objects.create(_KIND, caller.tenant, batch_id, now, b"null")
    start_batch(services, record)
    return find(services, caller, batch_id)


def find(services: Services, caller: Caller, batch_id: str) -> BatchRecord:
    """Return one of the caller's message batches; raises ApiError (404) if there is none."""
    stored = services.objects.get("batch", caller.tenant, batch_id)
    record = decode(stored.document) if stored is not None else None
    if record is None or record.api != "anthropic":
        raise not_found("message batch", batch_id)
    return record


def view(services: Services, record: BatchRecord, base_url: str) -> MessageBatch:
    """Return a batch as it is shown."""
    split = Split()
    if record.status in ENDED:
        stored = services.objects.get(_KIND, record.tenant, record.id)
        known = split_in(stored) if stored is not None else None
        split = known or count(services, record)
        if known is None and stored is not None:
            _remember(services, record, stored, split)
    return shown(record, split, base_url)


def _remember(services: Services, record: BatchRecord, stored: Stored, split: Split) -> None:
    """Keep what was counted: the error file may be long, and is removed one day."""
    services.objects.replace(
        _KIND, record.tenant, stored, _encode(split), record.created_at, end_of_record(record)
    )


def page(
    services: Services, caller: Caller, base_url: str, *, after: str, before: str, limit: int
) -> MessageBatchList:
    """Return batches, newest first: those after one of them, or those just before one."""
    if after and before:
        raise invalid("give after_id or before_id, not both", "after_id")
    found = services.objects.page(
        _KIND, caller.tenant, after=after or before, limit=limit, oldest_first=bool(before)
    )
    if found is None:
        raise not_found("message batch", after or before)
    entries = found.objects[::-1] if before else found.objects
    data = []
    for entry in entries:
        stored = services.objects.get("batch", caller.tenant, entry.id)
        if stored is not None:  # else its create ended between the two
            data.append(view(services, decode(stored.document), base_url))
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return MessageBatchList(data=data, has_more=found.has_more, first_id=first, last_id=last)


def cancel(services: Services, caller: Caller, batch_id: str) -> BatchRecord:
    """Begin to cancel a batch; the same again for one that is being cancelled or was."""
    record = find(services, caller, batch_id)
    if record.status in ENDED and record.status != "cancelled":
        raise invalid(f"batch {batch_id} has ended; only one that is in progress can be canceled")
    return request_cancel(services, caller.tenant, batch_id) or record


def delete(services: Services, caller: Caller, batch_id: str) -> None:
    """Remove a batch that has ended, with its files."""
    record = find(services, caller, batch_id)
    if record.status not in ENDED:
        raise invalid(f"batch {batch_id} is in progress: cancel it, then delete it")
    files = Files(services)
    for file_id in (record.input_file_id, record.output_file_id, record.error_file_id):
        if file_id is not None:
            files.delete(caller.tenant, file_id)
    # The batch last: who asks again, because a gateway died at it, must find it.
    services.objects.delete("batch", caller.tenant, batch_id)


def ended(services: Services, caller: Caller, batch_id: str) -> BatchRecord:
    """Return a batch whose results can be read; raises ApiError if it has not ended."""
    record = find(services, caller, batch_id)
    if record.status not in ENDED:
        raise invalid(f"batch {batch_id} is in progress; it has results once it has ended")
    files = [f for f in (record.output_file_id, record.error_file_id) if f is not None]
    if files and not any(Files(services).get(caller.tenant, f) for f in files):
        raise ApiError(404, f"the results of batch {batch_id} have expired", code="results_expired")
    return record
