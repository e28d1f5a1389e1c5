"""Defines a batch's record, JSON in Redis, and the calls that write it.

If a process dies within one of these functions, another process calls the function again.
"""

from __future__ import annotations

from itertools import chain
from typing import Any, Literal

import msgspec

from contract.redis.failures import FailedCode
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
#: The key of a batch's metadata with the failures after which it is cancelled: `100` or `5%`.
STOP_AFTER = "stop_after_failures"
#: The key of a batch's metadata with the greatest age of known answers to reuse: `7d`, or `any`.
REUSE = "warmq_reuse"
#: Seconds for which a record is kept after its batch's end: the longest life of OpenAI's files.
KEPT_S = 30 * 86_400
#: Milliseconds after which a new batch becomes due if its gateway dies: while it writes the record
#: (_LOOK_MS), or before, once it reserves tokens (_NOTED_MS, longer than a create waits for Redis).
_LOOK_MS, _NOTED_MS = 10_000, 60_000


class BatchPart(msgspec.Struct, frozen=True):
    """A queue batch: the lines of a batch that go to one queue.

    The first one also has the lines whose model no worker serves; each of them is refused.
    """

    batch_id: str
    model: str  # the first of its models
    queue: str
    models: list[str] = []  # all of its models; '' for lines that name none
    named: str = ""  # the model given to lines that name none
    all_served: bool = False  # whether every line's model is served
    served: str = msgspec.field(default="", name="told")  # text for errors: the served models
    made: bool = False  # whether it has been in the queue; if it is missing there, it was deleted


class BatchError(msgspec.Struct, frozen=True):
    """One reason why a whole file was refused; `line` counts from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class RequestCounts(msgspec.Struct):
    """Counts of a batch's requests; `failed` includes expired and cancelled ones."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Usage(msgspec.Struct):
    """Token counts of a batch; `cached` counts the input tokens that the prefix cache had."""

    input: int = 0
    output: int = 0
    cached: int = 0
    reasoning: int = 0


class BatchRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One batch. Times are in seconds since 1970.

    `changed_at` has the time at which each status began. A write fails if another process has
    changed the record since it was read.
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
    traceparent: str = ""  # of the request that created the batch, if it is traced
    model: str = ""  # set if all lines name the same model
    problems: list[BatchError] = []
    stopped: str = ""  # why it was cancelled, if too many of its requests failed
    parts: list[BatchPart] = []  # empty until the file is validated
    counts: RequestCounts = msgspec.field(default_factory=RequestCounts)  # final once ended
    usage: Usage | None = None  # final once ended
    expected_s: float | None = None  # the planned duration, set at the end
    failures: list[FailedCode] = []  # set at the end, like all fields below
    cut: int = 0  # answers with finish_reason `length`
    cached: int = 0  # requests that known answers answered
    output_file_id: str | None = None
    error_file_id: str | None = None


decode = msgspec.json.Decoder(BatchRecord).decode
encode = msgspec.json.Encoder().encode


def end_of_record(record: BatchRecord) -> int | None:
    """Return the time (s since 1970) at which a record is removed; None while its batch runs."""
    if record.status not in ENDED:
        return None
    return record.changed_at.get(record.status, record.expires_at) + KEPT_S


def reserve(services: Services, caller: Caller, batch_id: str, size: int) -> None:
    """Reserve tokens for a new batch, estimated from the size of its file.

    The models ('' here) are not known yet. If the record is never written, `forget_batch` gives the
    tokens back.
    """
    services.due.add("batch", batch_id, _NOTED_MS)
    services.limits.reserve(caller, batch_id, {"": estimated_tokens(size)})


def forget_batch(services: Services, batch_id: str) -> None:
    """Remove the reservation and the list entry of a batch that has no record."""
    services.limits.give_back(batch_id)
    owner = services.objects.owner_of("message_batch", batch_id)
    if owner is not None:
        services.objects.delete("message_batch", owner, batch_id)


def start_batch(services: Services, record: BatchRecord) -> None:
    """Write a new batch's record unless its id exists, and make the batch due."""
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
    """Replace the record that was read; return None if another process has changed it since."""
    ends_at = end_of_record(record)
    if ends_at is not None and record.api == "anthropic":
        # This comes first, so that both records get an end if this process dies in between.
        services.records.end("message_batch", record.id, ends_at)
    return services.objects.replace(
        "batch", record.tenant, read, encode(record), record.created_at, ends_at
    )


def request_cancel(services: Services, tenant: str, batch_id: str) -> BatchRecord | None:
    """Mark a batch as cancelling and make it due; return it, None if missing."""
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
    """Release an ended batch's tokens and input file, and note its webhooks."""
    services.limits.give_back(record.id)
    services.objects.forget_reader(record.input_file_id, record.id)
    note_webhooks(services, record)


def note_webhooks(services: Services, record: BatchRecord) -> None:
    """Note a webhook for each endpoint that is registered for the batch's end.

    Repeated calls change nothing.
    """
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
        # This is repeated for a noted webhook: the process that noted it may have died before this.
        services.due.add("webhook", delivery.id)


#: Records that are read in one round trip to Redis.
_PAGE = 100
#: The kinds whose lists name batches; batches of Anthropic's API are only in the second list.
_LISTS: tuple[Kind, ...] = ("batch", "message_batch")


def end_older_records(services: Services, tenant: str) -> int:
    """Count the records that an earlier version wrote; those of ended batches get an expiry.

    Returns:
        The number of records that got an expiry.
    """
    counted_ids = {record.id for record in services.records.of(tenant) if record.kind == "batch"}
    lists = (services.records.listed(kind, tenant) for kind in _LISTS)
    uncounted_ids = [
        name for name in dict.fromkeys(chain.from_iterable(lists)) if name not in counted_ids
    ]
    count = 0
    for begin in range(0, len(uncounted_ids), _PAGE):
        ids = uncounted_ids[begin : begin + _PAGE]
        for stored in filter(None, services.objects.get_many("batch", ids)):
            record = decode(stored.document)
            if write_back(services, stored, record) is not None:
                count += record.status in ENDED
    return count
