"""What can be done to batches over HTTP: create, retrieve, list, cancel."""

from __future__ import annotations

from contract.batch import Batch as QueueBatch
from gateway.batches.api.create import checked, id_for
from gateway.batches.api.protocol import Batch, BatchList
from gateway.batches.api.record import ENDED, BatchRecord
from gateway.batches.api.shown import shown, view_status
from gateway.batches.api.starting import announce_batch, request_cancel, start_batch
from gateway.files.objects import Files
from gateway.http.caller import Caller
from gateway.http.errors import ApiError, not_found
from gateway.http.limits import estimated_tokens
from gateway.http.services import Services
from gateway.redis.batch_views import BatchView, BatchViews


def create(services: Services, caller: Caller, body: bytes, idempotency: str) -> Batch:
    """Make a batch, or find the one that the same create has made before."""
    if idempotency:
        # Its file may have gone since, and its window has begun: nothing is checked again.
        view = BatchViews.beside(services.batches).get(caller.tenant, id_for(caller, idempotency))
        batch = shown(view) if view else None
        if batch is not None:
            return batch
    services.limits.check_records(caller)
    services.limits.check_stored(caller)
    record = checked(services, caller, body, idempotency)
    _reserve(services, caller, record)
    start_batch(services, record)
    return retrieve(services, caller, record.id)


def _reserve(services: Services, caller: Caller, record: BatchRecord) -> None:
    """Hold the batch's tokens of the tenant's budget, about: its models are not known yet.

    A batch that is not created after all, because its gateway dies, holds nothing after a minute.
    """
    announce_batch(services, record.id)
    file = Files(services).get(caller.tenant, record.input_file_id)
    tokens = estimated_tokens(file.bytes) if file else 0
    services.limits.reserve(caller, record.id, {"": tokens})


def view_of(services: Services, caller: Caller, batch_id: str) -> BatchView:
    """Return one of the caller's batches as it is now.

    Raises:
        ApiError: 404, if the caller has none of that id.
    """
    view = BatchViews.beside(services.batches).get(caller.tenant, batch_id)
    if view is None:
        raise not_found("batch", batch_id)
    return view


def retrieve(services: Services, caller: Caller, batch_id: str, *, partial: bool = False) -> Batch:
    """Return one of the caller's batches: one round trip, however many requests it has."""
    batch = shown(view_of(services, caller, batch_id), partial=partial)
    if batch is None:
        raise not_found("batch", batch_id)
    return batch


def page(services: Services, caller: Caller, after: str, limit: int) -> BatchList:
    """Return the caller's batches after one of them, newest first."""
    found = BatchViews.beside(services.batches).page(caller.tenant, after=after, limit=limit)
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
    view = view_of(services, caller, batch_id)
    if shown(view) is None:  # made by Anthropic's API, which has a route of its own for it
        raise not_found("batch", batch_id)
    status = view_status(view)
    if status in ENDED and status != "cancelled":
        told = f"batch {batch_id} is {status}: only one that runs can be cancelled"
        raise ApiError(400, told, code="batch_not_cancellable", param="batch_id")
    if status not in ("cancelled", "cancelling"):
        if isinstance(view.source, QueueBatch):
            services.batches.begin_cancel(view.source)
        else:
            request_cancel(services, caller.tenant, batch_id)
    return retrieve(services, caller, batch_id), view
