"""Creates, retrieves, cancels and deletes background responses, and looks after those that wait.

The record is written first, and then the request is pushed. If a gateway dies in between, `look`
pushes the request: the script RESPONSE_PUSH does so only once for each record.
"""

from __future__ import annotations

import logging
from typing import Any

import orjson

from contract.errors import StoreFull, StoreUnavailable, StoreUnreachable
from contract.redis.due import Claim
from contract.traces import now as trace_time
from gateway.http.caller import Caller
from gateway.http.errors import ApiError, not_found
from gateway.http.services import Services
from gateway.http.tracing import current
from gateway.online.request import OnlineRequest
from gateway.online.responses.objects import input_items, new_object, page_of, response_object
from gateway.online.responses.record import (
    GRACE_S,
    WINDOW_S,
    ResponseRecord,
    decode,
    encode,
    id_for,
    is_id,
    is_lost,
    new_record,
)
from gateway.redis.responses import StoredResponse

log = logging.getLogger(__name__)

#: Milliseconds after which a new response is looked at: if its gateway dies before the record is
#: written (longer than a create waits for Redis), and if it dies before it pushes the request.
_NOTED_MS, _LOOK_MS = 60_000, 10_000
#: Longest time in ms between two looks at a response that has not ended.
_MOST_LOOK_MS = 3_600_000


def create(
    services: Services, caller: Caller, asked: OnlineRequest, queue: str, idempotency: str
) -> dict[str, Any]:
    """Create a response and queue its request; or return the one that an earlier try created.

    Raises:
        ApiError: 429 if a budget of the tenant is too small.
        StoreUnavailable: The queue is full, or Redis is unreachable: nothing was created.
    """
    if idempotency and (earlier := _found(services, caller, id_for(caller, idempotency))):
        return _shown(services, *earlier)
    services.limits.check_records(caller)
    trace = current()
    span = trace.context.child() if trace is not None else None
    began = trace_time() if span is not None else 0
    record = new_record(
        asked, orjson.loads(asked.body), caller, queue, now=services.clock.now(),
        idempotency=idempotency, trace=dict(span.headers()) if span is not None else None,
    )  # fmt: skip
    services.due.add("response", record.id, _NOTED_MS)
    services.limits.reserve(caller, record.id, {asked.model or "": asked.tokens}, "response")
    if not _write(services, record, asked.body):
        return retrieve(services, caller, record.id)
    _push_first(services, record, asked.body)
    if trace is not None and span is not None:
        trace.queued(span, queue, record.request_id, began)
    return new_object(record)


def _write(services: Services, record: ResponseRecord, body: bytes) -> bool:
    """Write a new record; return False if another try with the same key has written it."""
    return services.responses.create(
        record.id, record.tenant, record.created_at, encode(record), body,
        life_ms=(WINDOW_S + GRACE_S) * 1000 + services.settings.result_ttl_ms, look_ms=_LOOK_MS,
    )  # fmt: skip


def _push(services: Services, record: ResponseRecord, body: bytes) -> str:
    """Queue the request of a record, unless it was queued; return why the queue is full, or ''."""
    settings = services.settings
    return services.responses.push(
        record.id, record.list_key, record.message(body, settings.result_ttl_ms),
        high_water=settings.high_water, high_water_requests=settings.high_water_requests,
    )  # fmt: skip


def _push_first(services: Services, record: ResponseRecord, body: bytes) -> None:
    """Queue the request of a new record; if the queue is full, forget it and raise StoreFull."""
    try:
        full = _push(services, record, body)
    except StoreUnreachable as error:
        # The response exists, and its request may be queued: an error would make the caller send
        # it again.
        log.warning(
            "the request of %s is queued later: %s", record.id, error.message,
            extra={"action": "queued_later"},
        )  # fmt: skip
        return
    except StoreUnavailable:
        _forget(services, record)
        raise
    if full:
        _forget(services, record)
        raise StoreFull(f"the queue is full, try again later: {full}")


def _forget(services: Services, record: ResponseRecord) -> None:
    services.objects.delete("response", record.tenant, record.id)
    services.limits.give_back(record.id)


def retrieve(services: Services, caller: Caller, response_id: str) -> dict[str, Any]:
    """Return one of the caller's responses; raise ApiError (404)."""
    return _shown(services, *_existing(services, caller, response_id))


def cancel(services: Services, caller: Caller, response_id: str) -> dict[str, Any]:
    """Cancel a response; one that has ended is returned as it is. Raises ApiError (404)."""
    _existing(services, caller, response_id)
    if not _cancel(services, caller.tenant, response_id):
        raise not_found("response", response_id)
    services.limits.give_back(response_id)
    return retrieve(services, caller, response_id)


def _cancel(services: Services, tenant: str, response_id: str) -> bool:
    return services.responses.cancel(
        response_id, tenant, keep_ms=services.settings.result_ttl_ms, revoked_s=WINDOW_S + GRACE_S
    )


def delete(services: Services, caller: Caller, response_id: str) -> dict[str, Any]:
    """Delete a response with its result, and cancel it if it has not ended; raise ApiError."""
    _existing(services, caller, response_id)
    # The cancellation comes first: without a record nobody could cancel the request.
    _cancel(services, caller.tenant, response_id)
    if not services.objects.delete("response", caller.tenant, response_id):
        raise not_found("response", response_id)
    services.responses.delete_result(response_id)
    services.limits.give_back(response_id)
    return {"id": response_id, "object": "response", "deleted": True}


def items(
    services: Services, caller: Caller, response_id: str, *, after: str, limit: int,
    oldest_first: bool,
) -> dict[str, Any]:  # fmt: skip
    """Return a page of a response's input items; raise ApiError (404)."""
    _, record = _existing(services, caller, response_id)
    body = services.responses.body(response_id)
    if not body:  # deleted meanwhile
        raise not_found("response", response_id)
    found = input_items(record, orjson.loads(body).get("input"))
    page = page_of(found, after=after, limit=limit, oldest_first=oldest_first)
    if page is None:
        raise ApiError(404, f"No such item: {after[:200]}", code="item_not_found", param="after")
    return page


def _found(
    services: Services, caller: Caller, response_id: str
) -> tuple[StoredResponse, ResponseRecord] | None:
    stored = services.responses.get(response_id) if is_id(response_id) else None
    if stored is None or stored.owner != caller.tenant:
        return None
    return stored, decode(stored.document)


def _existing(
    services: Services, caller: Caller, response_id: str
) -> tuple[StoredResponse, ResponseRecord]:
    found = _found(services, caller, response_id)
    if found is None:
        raise not_found("response", response_id)
    return found


def _shown(services: Services, stored: StoredResponse, record: ResponseRecord) -> dict[str, Any]:
    """Return a response as JSON; note its end if this is the first call that finds it."""
    if stored.ended and not stored.noted:
        _note_end(services, stored)
    waits = stored.pushed and not stored.ended
    running = waits and record.request_id in services.responses.running()
    return response_object(record, stored, running=running, now=services.clock.now())


def _note_end(services: Services, stored: StoredResponse) -> None:
    services.responses.note_end(stored.id)
    services.limits.give_back(stored.id)


def look(services: Services, claim: Claim) -> bool:
    """Push what was not pushed, and note an end; return whether the response needs no more looks.

    The times between two looks grow with the response's age.
    """
    stored = services.responses.get(claim.id)
    record = decode(stored.document) if stored is not None else None
    now = services.clock.now()
    if stored is None or record is None or is_lost(stored, record, now):
        services.limits.give_back(claim.id)
    elif stored.ended:
        _note_end(services, stored)
    else:
        if not stored.pushed:
            _push(services, record, services.responses.body(claim.id))
        services.due.release(claim, _next_look_ms(services, stored, now - record.created_at))
        return False
    services.due.finish(claim)
    return True


def _next_look_ms(services: Services, stored: StoredResponse, age_s: float) -> int:
    """Return ms until the next look: the end must be noted while the result is there."""
    if not stored.pushed:
        return _LOOK_MS
    most_ms = min(_MOST_LOOK_MS, services.settings.result_ttl_ms // 4)
    return max(1000, min(most_ms, int(age_s * 500) + _LOOK_MS))
