"""Creates, retrieves, lists and cancels batches. The batch runner validates a new batch's file."""

from __future__ import annotations

from collections.abc import Callable

from contract.batch import Batch as QueueBatch
from contract.durations import duration_s
from contract.openai.body import BODY_TYPES
from contract.redis.announcements import is_alive
from contract.redis.url import LONGEST_S
from contract.version import PROTOCOL
from gateway.batches.api.protocol import Batch, BatchCreate, BatchList, batch_object
from gateway.batches.api.record import (
    ENDED,
    REUSE,
    STOP_AFTER,
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
from producer.input.options import BadOption
from producer.queue_workers import count_versions, describe_workers, older_workers
from producer.submit.reuse import oldest_age_s
from producer.submit.submission import stop_after_text


def create(services: Services, caller: Caller, body: bytes, idempotency: str) -> Batch:
    """Create a batch, or return the one that an earlier try has created."""
    if idempotency:
        # The body is not checked again: the batch's file may have been deleted since.
        view = BatchViews.using(services.batches).get(caller.tenant, id_for(caller, idempotency))
        batch = batch_object(view) if view else None
        if batch is not None:
            return batch
    services.limits.check_records(caller)
    services.limits.check_stored(caller)
    record, size = _checked_record(services, caller, body, idempotency)
    reserve(services, caller, record.id, size)
    start_batch(services, record)
    return retrieve(services, caller, record.id)


def view_of(services: Services, caller: Caller, batch_id: str) -> BatchView:
    """Return one of the caller's batches, as read from Redis; raise ApiError (404) if none."""
    view = BatchViews.using(services.batches).get(caller.only_tenant, batch_id)
    if view is None:
        raise not_found("batch", batch_id)
    return view


def find(
    services: Services, caller: Caller, batch_id: str, *, partial: bool = False
) -> tuple[Batch, BatchView]:
    """Return one of the caller's OpenAI batches, also as read from Redis; raise ApiError (404)."""
    view = view_of(services, caller, batch_id)
    batch = batch_object(view, partial=partial)
    if batch is None:
        raise not_found("batch", batch_id)
    return batch, view


def retrieve(services: Services, caller: Caller, batch_id: str, *, partial: bool = False) -> Batch:
    return find(services, caller, batch_id, partial=partial)[0]


def page(services: Services, caller: Caller, after: str, limit: int) -> BatchList:
    views = BatchViews.using(services.batches).page(caller.only_tenant, after=after, limit=limit)
    if views is None:
        raise not_found("batch", after)
    data = [batch for view in views.batches if (batch := batch_object(view)) is not None]
    return BatchList(
        data=data,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
        has_more=views.has_more,
    )


def cancel(services: Services, caller: Caller, batch_id: str) -> tuple[Batch, BatchView]:
    """Begin to cancel a batch; one that is cancelling or cancelled stays as it is.

    Returns:
        The batch and its BatchView. If `producer submit` made the batch, the caller of this
        function must still cancel its requests.

    Raises:
        ApiError: 404 if there is no such batch, 400 if it has ended with another status.
    """
    batch, view = find(services, caller, batch_id)
    if batch.status in ENDED and batch.status != "cancelled":
        message = f"batch {batch_id} is {batch.status}: only a running one can be cancelled"
        raise invalid(message, "batch_id", "batch_not_cancellable")
    if batch.status not in ("cancelled", "cancelling"):
        if isinstance(view.source, QueueBatch):
            services.batches.begin_cancel(view.source)
        else:
            request_cancel(services, caller.tenant, batch_id)
    return retrieve(services, caller, batch_id), view


#: The default priority of a batch, the same as in `producer submit`.
DEFAULT_PRIORITY = 6


def window_s(text: str) -> int:
    """Return the seconds of a completion window such as `24h` or `1h30m`; raise ApiError (400)."""
    field = "completion_window"
    # A longer text could have an infinite sum.
    seconds = duration_s(text) if len(text) <= 40 else None
    if seconds is None:
        raise invalid(f"{field} is {text[:40]!r}; give a duration such as 24h, 90m or 7d", field)
    if not 1 <= seconds <= LONGEST_S:
        raise invalid(f"{field} is {text}; give a duration of 1s to ten years", field)
    return round(seconds)


def _checked_record(
    services: Services, caller: Caller, body: bytes, idempotency: str
) -> tuple[BatchRecord, int]:
    """Check the body of POST /v1/batches; return the new record and its file's size.

    Raises:
        ApiError: 400 for a wrong field, 403 for a forbidden priority, 404 for an unknown file, 409
            if all workers are older than this gateway.
    """
    asked = read(body, BatchCreate)
    if asked.endpoint not in BODY_TYPES:
        served = ", ".join(BODY_TYPES)
        message = f"endpoint {asked.endpoint[:100]!r} is not served; use one of {served}"
        raise invalid(message, "endpoint")
    window = window_s(asked.completion_window)
    priority = _priority(caller, asked.priority)
    file = _file_of(services, caller, asked.input_file_id)
    _check_workers(services, caller)
    _check_metadata(asked)
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


def _check_metadata(asked: BatchCreate) -> None:
    """Raise ApiError (400) for an option in the metadata that cannot be read."""
    metadata = asked.metadata or {}
    checks: tuple[tuple[str, Callable[[object, str], object]], ...] = (
        (STOP_AFTER, stop_after_text), (REUSE, oldest_age_s),
    )  # fmt: skip
    for name, check in checks:
        try:
            check(metadata.get(name), f"metadata.{name}")
        except BadOption as error:
            raise invalid(error.message, f"metadata.{name}") from None
    if REUSE in metadata and (asked.order or "input") != "input":
        raise invalid(f"metadata.{REUSE} and order exclude each other: give one", "order")


def _priority(caller: Caller, asked: int | None) -> int:
    if asked is None:
        return max(DEFAULT_PRIORITY, caller.highest_priority)
    if asked < caller.highest_priority:
        message = f"priority {asked}: this key allows {caller.highest_priority} to 9 (0 is highest)"
        raise ApiError(403, message, code="priority_not_allowed", param="priority")
    return asked


def _file_of(services: Services, caller: Caller, file_id: str) -> FileRecord:
    file = Files(services).get(caller.tenant, file_id)
    if file is None:
        message = f"No such file: {file_id[:200]}; upload it with purpose=batch first"
        raise ApiError(404, message, code="file_not_found", param="input_file_id")
    if file.purpose != "batch":
        message = f"file {file_id} has the purpose {file.purpose!r}; upload it with purpose=batch"
        raise invalid(message, "input_file_id")
    return file


def _check_workers(services: Services, caller: Caller) -> None:
    """Raise ApiError (409) if all workers are older than this gateway.

    The batch runner checks the workers of each model's queue once it has read the file.
    """
    announced, settings = services.batches.announcements(), services.settings
    older = older_workers([one for one in announced if is_alive(one)])
    if not older:
        return
    # Workers' names are names of machines, which only an operator may see.
    which = describe_workers(older) if caller.operator else count_versions(older)
    served = ServedModels.of(announced, settings.queue, settings.gateway_models)
    if served.outdated and not served.names and not served.configured:
        message = (
            f"nothing was queued: all workers are older than this gateway (protocol {PROTOCOL}) "
            f"and would not take what it queues: {which}; upgrade the workers"
        )
        raise ApiError(409, message, code="older_workers", retry=False)


def id_for(caller: Caller, idempotency: str) -> str:
    """Return the id of the batch that every try with one Idempotency-Key creates."""
    return id_of("batch_", f"batch\0{caller.tenant}\0{idempotency}")
