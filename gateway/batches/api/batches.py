"""What can be done to batches over HTTP: create, retrieve, list, cancel. The lines of a new batch's
file are looked at later (runner/)."""

from __future__ import annotations

from contract.batch import Batch as QueueBatch
from contract.durations import duration_s
from contract.openai.body import BODY_TYPES
from contract.redis.announcements import is_alive
from contract.redis.url import LONGEST_S
from contract.version import PROTOCOL
from gateway.batches.api.protocol import Batch, BatchCreate, BatchList, shown
from gateway.batches.api.record import (
    ENDED,
    BatchRecord,
    request_cancel,
    reserve,
    start_batch,
)
from gateway.files.files import FileRecord, Files
from gateway.http.caller import Caller
from gateway.http.errors import ApiError, invalid, not_found
from gateway.http.json_api import id_of, new_id, read
from gateway.http.services import Services
from gateway.redis.batch_views import BatchView, BatchViews
from gateway.served_models import ServedModels
from producer.queue_workers import count_versions, describe_workers, older_workers


def create(services: Services, caller: Caller, body: bytes, idempotency: str) -> Batch:
    """Make a batch, or find the one that the same create has made before."""
    if idempotency:
        # Its file may have gone since, and its window has begun: nothing is checked again.
        view = BatchViews.using(services.batches).get(caller.tenant, id_for(caller, idempotency))
        batch = shown(view) if view else None
        if batch is not None:
            return batch
    services.limits.check_records(caller)
    services.limits.check_stored(caller)
    record, size = checked(services, caller, body, idempotency)
    reserve(services, caller, record.id, size)
    start_batch(services, record)
    return retrieve(services, caller, record.id)


def view_of(services: Services, caller: Caller, batch_id: str) -> BatchView:
    """Return one of the caller's batches as it is now.

    Raises:
        ApiError: 404, if the caller has none of that id.
    """
    view = BatchViews.using(services.batches).get(caller.tenant, batch_id)
    if view is None:
        raise not_found("batch", batch_id)
    return view


def find(
    services: Services, caller: Caller, batch_id: str, *, partial: bool = False
) -> tuple[Batch, BatchView]:
    """Return one of the caller's batches, and its view: one round trip, however many requests it
    has.

    Raises:
        ApiError: 404, if the caller has none of that id, or it was made by Anthropic's API, which
            has routes of its own for it.
    """
    view = view_of(services, caller, batch_id)
    batch = shown(view, partial=partial)
    if batch is None:
        raise not_found("batch", batch_id)
    return batch, view


def retrieve(services: Services, caller: Caller, batch_id: str, *, partial: bool = False) -> Batch:
    """Return one of the caller's batches."""
    return find(services, caller, batch_id, partial=partial)[0]


def page(services: Services, caller: Caller, after: str, limit: int) -> BatchList:
    """Return the caller's batches after one of them, newest first."""
    found = BatchViews.using(services.batches).page(caller.tenant, after=after, limit=limit)
    if found is None:
        raise not_found("batch", after)
    data = [batch for view in found.batches if (batch := shown(view)) is not None]
    return BatchList(
        data=data,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
        has_more=found.has_more,
    )


def cancel(services: Services, caller: Caller, batch_id: str) -> tuple[Batch, BatchView]:
    """Begin to cancel a batch; the answer is the same for one that is being cancelled or was.

    Returns:
        It, and its view: the requests of one of `producer submit` are still to be ended.

    Raises:
        ApiError: 404; 400 for a batch that has ended otherwise.
    """
    batch, view = find(services, caller, batch_id)
    if batch.status in ENDED and batch.status != "cancelled":
        told = f"batch {batch_id} is {batch.status}: only one that runs can be cancelled"
        raise ApiError(400, told, code="batch_not_cancellable", param="batch_id")
    if batch.status not in ("cancelled", "cancelling"):
        if isinstance(view.source, QueueBatch):
            services.batches.begin_cancel(view.source)
        else:
            request_cancel(services, caller.tenant, batch_id)
    return retrieve(services, caller, batch_id), view


#: The priority of requests for which none is named, as `producer submit` has it.
DEFAULT_PRIORITY = 6


def window_s(text: str) -> int:
    """Return the seconds of a completion window such as `24h`, `90m`, `7d` or `1h30m`.

    Raises:
        ApiError: for any other text, less than a second or more than ten years.
    """
    field = "completion_window"
    # The length is bounded for the sake of the sum, which otherwise could be endless.
    seconds = duration_s(text) if len(text) <= 40 else None
    if seconds is None:
        raise invalid(f"{field} is {text[:40]!r}; give a duration such as 24h, 90m or 7d", field)
    if not 1 <= seconds <= LONGEST_S:
        raise invalid(f"{field} is {text}; give a duration of 1s to ten years", field)
    return round(seconds)


def checked(
    services: Services, caller: Caller, body: bytes, idempotency: str
) -> tuple[BatchRecord, int]:
    """Return the record for the body of a create, and the bytes of its file.

    With `idempotency` the id is derived from it, so that the same create makes the same batch.

    Raises:
        ApiError: 400 for a wrong field, 403 for what the key does not allow, 404 for a file that is
            not the caller's, each with the field's name; 409 beside older workers.
    """
    asked = read(body, BatchCreate)
    if asked.endpoint not in BODY_TYPES:
        told = (
            f"endpoint {asked.endpoint[:100]!r} is not served; use one of {', '.join(BODY_TYPES)}"
        )
        raise invalid(told, "endpoint")
    window = window_s(asked.completion_window)
    priority = _priority(caller, asked.priority)
    file = _file_of(services, caller, asked.input_file_id)
    _check_workers(services, caller)
    now, kept = int(services.clock.now()), asked.output_expires_after
    record = BatchRecord(
        id=id_for(caller, idempotency) if idempotency else new_id("batch_"),
        tenant=caller.tenant,
        key_id=caller.key_id,
        endpoint=asked.endpoint,
        input_file_id=asked.input_file_id,
        completion_window=asked.completion_window,
        created_at=now,
        expires_at=now + window,
        changed_at={"validating": now},
        metadata=asked.metadata,
        output_expires_after_s=kept.seconds if kept else None,
        order=asked.order or "input",
        once=bool(asked.once),
        priority=priority,
    )
    return record, file.bytes


def _priority(caller: Caller, asked: int | None) -> int:
    if asked is None:
        return max(DEFAULT_PRIORITY, caller.highest_priority)
    if asked < caller.highest_priority:
        told = f"priority {asked}: this key allows {caller.highest_priority} to 9 (0 is highest)"
        raise ApiError(403, told, code="priority_not_allowed", param="priority")
    return asked


def _file_of(services: Services, caller: Caller, file_id: str) -> FileRecord:
    found = Files(services).get(caller.tenant, file_id)
    if found is None:
        told = f"No such file: {file_id[:200]}; upload it with purpose=batch first"
        raise ApiError(404, told, code="file_not_found", param="input_file_id")
    if found.purpose != "batch":
        told = f"file {file_id} has the purpose {found.purpose!r}; upload it with purpose=batch"
        raise invalid(told, "input_file_id")
    return found


def _check_workers(services: Services, caller: Caller) -> None:
    """Refuse what only older workers would be there for, who do not take it.

    Which queues the file's lines name is not known yet; when they are, they are looked at again
    (runner/).
    """
    announced, settings = services.batches.announcements(), services.settings
    older = older_workers([one for one in announced if is_alive(one)])
    if not older:
        return
    # Workers' names are those of machines, which a tenant need not know.
    which = describe_workers(older) if caller.operator else count_versions(older)
    served = ServedModels.of(announced, settings.queue, settings.gateway_models)
    if served.outdated and not served.names and not served.configured:
        told = (
            f"nothing was queued: all workers are older than this gateway (protocol {PROTOCOL}) "
            f"and would not take what it queues: {which}; upgrade the workers"
        )
        raise ApiError(409, told, code="older_workers", retry=False)


def id_for(caller: Caller, idempotency: str) -> str:
    """Return the id of the batch that a create makes, however often it is sent."""
    return id_of("batch_", f"batch\0{caller.tenant}\0{idempotency}")
