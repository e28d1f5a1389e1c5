"""The record of a batch: JSON in Redis, and the steps from its create to the end of the record.

Each step is repeated if a crash comes between its calls.
"""

from __future__ import annotations

from itertools import chain
from typing import Any, Literal

import msgspec

from contract.redis.objects import Kind, Stored
from gateway.files.files import Files
from gateway.http.caller import Caller
from gateway.http.limits import estimated_tokens
from gateway.http.services import Services
from gateway.http.tracing import current_traceparent
from gateway.redis.webhooks import Delivery, Webhooks, delivery_id

Status = Literal[
    "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling",
    "cancelled",
]  # fmt: skip
ENDED: frozenset[Status] = frozenset(("completed", "failed", "expired", "cancelled"))
#: The record is kept for so long after the batch's end, the longest life of OpenAI's files.
KEPT_S = 30 * 86_400
#: A new batch is due after _LOOK_MS even if its gateway dies before asking for it, and after
#: _NOTED_MS if it dies before writing it: longer than a create waits for Redis.
_LOOK_MS, _NOTED_MS = 10_000, 60_000


class BatchPart(msgspec.Struct, frozen=True):
    """The lines of a batch that go to one queue, as a batch of that queue.

    The first part also has the lines whose model nobody serves, which are refused one by one.
    """

    batch_id: str
    model: str  # the first of its models
    queue: str
    models: list[str] = []  # '' for lines that name none
    named: str = ""  # the model given to lines that name none
    all_served: bool = False  # no line has a model that nobody serves
    served: str = msgspec.field(default="", name="told")  # for errors: the models that are served
    made: bool = False  # the queue has had it; if it is missing, it was deleted


class BatchError(msgspec.Struct, frozen=True):
    """Why the whole file was refused; `line` counts from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class RequestCounts(msgspec.Struct):
    """Requests of a batch; `failed` are all that have no answer (expired, cancelled ones too)."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Usage(msgspec.Struct):
    """Tokens of a batch's answers; `cached` of the input's came from the prefix cache."""

    input: int = 0
    output: int = 0
    cached: int = 0
    reasoning: int = 0


class BatchRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One batch. Times are in seconds since 1970; `changed_at` has when each status began.

    A writer writes it with the version that it has read: of two writers one wins.
    """

    id: str
    tenant: str
    key_id: str = ""
    api: Literal["openai", "anthropic"] = "openai"
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int  # the deadline
    status: Status = "validating"
    changed_at: dict[str, int] = {}
    metadata: dict[str, str] | None = None
    output_expires_after_s: int | None = None
    order: Literal["input", "prefix", "auto"] = "input"
    once: bool = False
    priority: int = 6
    traceparent: str = ""  # of the request that made it, if that is traced
    model: str = ""  # if all lines name the same
    problems: list[BatchError] = []
    parts: list[BatchPart] = []  # empty until the file is validated
    counts: RequestCounts = msgspec.field(default_factory=RequestCounts)  # final once ended
    usage: Usage | None = None  # final once ended
    expected_s: float | None = None  # the planned duration, set at the end
    output_file_id: str | None = None
    error_file_id: str | None = None


decode = msgspec.json.Decoder(BatchRecord).decode
encode = msgspec.json.Encoder().encode


def end_of_record(record: BatchRecord) -> int | None:
    """Return when a record is removed, in seconds since 1970; None while its batch runs."""
    if record.status not in ENDED:
        return None
    return record.changed_at.get(record.status, record.expires_at) + KEPT_S


def reserve(services: Services, caller: Caller, batch_id: str, size: int) -> None:
    """Reserve tokens for a new batch by the bytes of its file, whose models are not known yet.

    If the batch is never written, `forget_batch` gives them back.
    """
    services.due.add("batch", batch_id, _NOTED_MS)
    services.limits.reserve(caller, batch_id, {"": estimated_tokens(size)})


def forget_batch(services: Services, batch_id: str) -> None:
    """Remove what belongs to a batch that has no record."""
    services.limits.give_back(batch_id)
    owner = services.objects.owner_of("message_batch", batch_id)
    if owner is not None:
        services.objects.delete("message_batch", owner, batch_id)


def start_batch(services: Services, record: BatchRecord) -> None:
    """Write a new batch unless its id exists, and make it due."""
    record = msgspec.structs.replace(record, traceparent=current_traceparent())
    services.due.add("batch", record.id, _LOOK_MS)
    Files(services).keep_content(record.input_file_id, record.id)
    services.objects.create("batch", record.tenant, record.id, record.created_at, encode(record))
    services.due.add("batch", record.id)


def changed(
    services: Services, record: BatchRecord, status: Status | None, **changes: Any
) -> BatchRecord:
    """Return a record with changes, and with the time of a new status."""
    if status is not None and status != record.status:
        at = record.changed_at | {status: int(services.clock.now())}
        changes |= {"status": status, "changed_at": at}
    return msgspec.structs.replace(record, **changes)


def write_back(services: Services, read: Stored, record: BatchRecord) -> Stored | None:
    """Write a record in place of what was read; None if another process has written it since."""
    ends_at = end_of_record(record)
    if ends_at is not None and record.api == "anthropic":
        # First: if this process dies in between, its other record must have an end as well.
        services.records.end("message_batch", record.id, ends_at)
    return services.objects.replace(
        "batch", record.tenant, read, encode(record), record.created_at, ends_at
    )


def request_cancel(services: Services, tenant: str, batch_id: str) -> BatchRecord | None:
    """Mark a batch as cancelling, and make it due; return it, or None if there is none."""
    while (read := services.objects.get("batch", tenant, batch_id)) is not None:
        record = decode(read.document)
        if record.status in ENDED or record.status == "cancelling":
            return record
        new = changed(services, record, "cancelling")
        if write_back(services, read, new) is not None:
            services.due.add("batch", batch_id)
            return new
    return None


def after_end(services: Services, record: BatchRecord) -> None:
    """Release what an ended batch holds, and note its webhooks."""
    services.limits.give_back(record.id)
    services.objects.forget_reader(record.input_file_id, record.id)
    note_webhooks(services, record)


def note_webhooks(services: Services, record: BatchRecord) -> None:
    """Note a delivery for each endpoint that wants a batch's end; repeated calls change nothing."""
    if record.status not in ENDED:
        return
    event, webhooks = f"batch.{record.status}", Webhooks.using(services.batches)
    for endpoint in webhooks.all():
        if endpoint.tenant != record.tenant or event not in endpoint.events:
            continue
        delivery = Delivery(
            id=delivery_id(record.id, endpoint.id, event),
            endpoint_id=endpoint.id,
            batch_id=record.id,
            event=event,
            created_at=record.changed_at.get(record.status, record.created_at),
        )
        webhooks.note(delivery)
        # Even if it was noted before: that process may have died here.
        services.due.add("webhook", delivery.id)


#: Records read in one round trip.
_PAGE = 100
#: The lists of batches: those of Anthropic's API are only in the second.
_LISTS: tuple[Kind, ...] = ("batch", "message_batch")


def end_older_records(services: Services, tenant: str) -> int:
    """Count the records that an earlier version has written, and give ended batches' an end.

    Returns:
        How many got an end.
    """
    known = {record.id for record in services.records.of(tenant) if record.kind == "batch"}
    lists = (services.records.listed(kind, tenant) for kind in _LISTS)
    unknown = [name for name in dict.fromkeys(chain.from_iterable(lists)) if name not in known]
    count = 0
    for begin in range(0, len(unknown), _PAGE):
        ids = unknown[begin : begin + _PAGE]
        for stored in filter(None, services.objects.get_many("batch", ids)):
            record = decode(stored.document)
            if write_back(services, stored, record) is not None:
                count += record.status in ENDED
    return count
