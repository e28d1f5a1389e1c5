"""What a gateway knows of a batch, kept in Redis as JSON; how a batch begins and is cancelled, so
that no crash between two steps loses one; and when its record ends."""

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

Status = Literal[
    "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling",
    "cancelled",
]  # fmt: skip
#: The record of a batch that has ended is kept for so long, as OpenAI's files are at most by
#: `expires_after`. Its files have ends of their own.
KEPT_S = 30 * 86_400
ENDED: frozenset[Status] = frozenset(("completed", "failed", "expired", "cancelled"))


class BatchPart(msgspec.Struct, frozen=True):
    """The lines for one queue: a batch of it, as `producer submit` makes them.

    The first part also has the lines whose model nobody serves: they are refused one by one.
    """

    batch_id: str
    model: str  # the first of its models
    queue: str
    models: list[str] = []  # what its lines name; '' for those that name none
    named: str = ""  # the model that its lines which name none are given
    all_served: bool = False  # whether it has no lines of models that nobody serves
    told: str = ""  # what such lines are told of the models that there are
    made: bool = False  # whether the queue has had it: if it is not there, it was deleted


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
    """One batch. Times are in seconds since 1970; `changed_at` has those at which a status began.

    Whoever changes it reads it, and writes it back with the version that was read
    (contract/redis/objects.py): only one of two writers wins, the other reads again.
    """

    id: str
    tenant: str
    key_id: str = ""
    api: Literal["openai", "anthropic"] = "openai"
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int  # the deadline: what has not begun by then expires
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
    parts: list[BatchPart] = []  # empty until the file was looked through
    counts: RequestCounts = msgspec.field(default_factory=RequestCounts)  # final once ended
    usage: Usage | None = None  # final once ended
    expected_s: float | None = None  # what was planned of its time; noted at its end
    output_file_id: str | None = None
    error_file_id: str | None = None


def end_of_record(record: BatchRecord) -> int | None:
    """Return when a record is removed, in seconds since 1970; None while its batch runs."""
    if record.status not in ENDED:
        return None
    return record.changed_at.get(record.status, record.expires_at) + KEPT_S


decode = msgspec.json.Decoder(BatchRecord).decode
encode = msgspec.json.Encoder().encode


#: Whoever carries batches looks for a new one at the latest after so long, also if the gateway that
#: was to ask for it died just before. It finds nothing if the batch itself was not written either.
_LOOK_MS = 10_000
#: And for what a create has noted before it wrote the batch. It is longer than any try of a create
#: waits for Redis.
_NOTED_MS = 60_000


def reserve(services: Services, caller: Caller, batch_id: str, size: int) -> None:
    """Hold the tokens of a new batch with a file of so many bytes, of the tenant's budget; about,
    for its models are not known yet.

    If the batch is not written after all, because its gateway dies, `forget_batch` gives them back
    after a minute.
    """
    services.due.add("batch", batch_id, _NOTED_MS)
    services.limits.reserve(caller, batch_id, {"": estimated_tokens(size)})


def forget_batch(services: Services, batch_id: str) -> None:
    """Remove what was noted for a batch that is not there."""
    services.limits.give_back(batch_id)
    owner = services.objects.owner_of("message_batch", batch_id)
    if owner is not None:
        services.objects.delete("message_batch", owner, batch_id)


def start_batch(services: Services, record: BatchRecord) -> None:
    """Write a new batch, if there is none of its id, and ask for it to be carried."""
    record = msgspec.structs.replace(record, traceparent=current_traceparent())
    services.due.add("batch", record.id, _LOOK_MS)
    Files(services).keep_content(record.input_file_id, record.id)
    services.objects.create("batch", record.tenant, record.id, record.created_at, encode(record))
    services.due.add("batch", record.id)


def changed(
    services: Services, record: BatchRecord, status: Status | None, **changes: Any
) -> BatchRecord:
    """Return a record with changes, and with the time at which it has got another status."""
    if status is not None and status != record.status:
        at = record.changed_at | {status: int(services.clock.now())}
        changes |= {"status": status, "changed_at": at}
    return msgspec.structs.replace(record, **changes)


def write_back(services: Services, read: Stored, record: BatchRecord) -> Stored | None:
    """Write a record in place of what was read, with its end if its batch has ended; return None
    if somebody else has written it since."""
    ends_at = end_of_record(record)
    if ends_at is not None and record.api == "anthropic":
        # First: if this process dies, what is beside the batch must have an end as well.
        services.records.end("message_batch", record.id, ends_at)
    return services.objects.replace(
        "batch", record.tenant, read, encode(record), record.created_at, ends_at
    )


def request_cancel(services: Services, tenant: str, batch_id: str) -> BatchRecord | None:
    """Note that a batch is to be cancelled, and ask for it to be done.

    Returns:
        It as it is now; None if the tenant has none of that id.
    """
    while (read := services.objects.get("batch", tenant, batch_id)) is not None:
        record = decode(read.document)
        if record.status in ENDED or record.status == "cancelling":
            return record
        anew = changed(services, record, "cancelling")
        if write_back(services, read, anew) is not None:
            services.due.add("batch", batch_id)
            return anew
    return None


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
        for stored in filter(None, services.objects.get_many("batch", ids)):
            record = decode(stored.document)
            if write_back(services, stored, record) is not None:
                count += record.status in ENDED
    return count
