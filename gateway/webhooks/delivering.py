"""Posts webhooks that are due, in a thread of each gateway.

A delivery is one webhook for one endpoint, a URL of a tenant. Endpoints take turns: an endpoint
that answered the last try may have two tries at a time, any other endpoint one. Endpoints that did
not answer share half of all tries. An endpoint that has left two tries in a row unanswered is
paused, then tried with one delivery, and paused for longer each time until it answers. Each gateway
only knows its own tries.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from contract.errors import StoreUnavailable
from contract.log_lines import set_log_fields
from contract.redis.due import Claim
from contract.webhooks import NotDelivered, body_of, headers_of, post
from gateway.http.services import Services
from gateway.redis.leases import Lease, Leases
from gateway.redis.webhooks import TRIED_S, Webhooks
from gateway.settings import LEASE_S

log = logging.getLogger(__name__)

#: Seconds before each further try; the last wait is repeated until three days have passed.
BACKOFF_S = (5, 30, 120, 600, 1800, 3600, 7200, 14400, 28800)
#: Most deliveries claimed in one call, and most calls before tries begin.
TAKEN, CLAIMS = 50, 10
#: Seconds between two calls that ask Redis for due deliveries.
LOOK_S = 0.5
#: Most tries at a time: in this gateway, for one endpoint that answered the last try, and for all
#: endpoints that did not answer it, or are new. A try without an answer takes 10 s.
AT_ONCE, FOR_ONE, FOR_UNPROVED = 32, 2, 16
#: Most deliveries that wait here for their endpoint's turn: of one endpoint, and of all.
WAITING_FOR_ONE, WAITING = 50, 1000
#: Tries in a row without an answer after which an endpoint is paused.
PAUSED_AFTER = 2
#: Seconds of the first pauses; the last one is repeated.
WAITS_S = (5.0, 30.0, 120.0, 300.0)
#: A delivery that cannot wait here is due again after the rest of its endpoint's pause, at least
#: LATER_S seconds. Each postponed delivery of the endpoint adds STEP_S; together they add at most
#: LATEST_S.
LATER_S, STEP_S, LATEST_S = 1.0, 0.02, 60.0
#: Seconds after which the state of an idle endpoint is forgotten.
FORGOTTEN_S = 3600.0


def _deliver(services: Services, claim: Claim) -> bool:
    """Try one delivery, and write its outcome; return whether the receiver answered.

    Also returns True if there was nothing to deliver.
    """
    webhooks = Webhooks.using(services.batches)
    delivery = webhooks.delivery(claim.id)
    endpoint = webhooks.get(delivery.endpoint_id) if delivery else None
    if delivery is None or delivery.ended or endpoint is None:
        services.due.finish(claim)
        return True
    set_log_fields(batch_id=delivery.batch_id)
    body = body_of(delivery.batch_id, delivery.event, delivery.created_at)
    headers = headers_of(delivery.id, body, endpoint.secret, int(time.time()))
    status, problem = 0, ""
    try:
        private = services.settings.gateway_private_webhooks
        status = post(endpoint.url, body, headers, private=private)
    except NotDelivered as error:
        problem = str(error)
    delivery.tries += 1
    in_s = BACKOFF_S[min(delivery.tries, len(BACKOFF_S)) - 1]
    outcome = ""
    if 200 <= status < 300:
        outcome = f"delivered at try {delivery.tries}"
    elif status == 410:
        webhooks.delete(endpoint.id)
        outcome = "the receiver answered 410: its endpoint is removed"
    else:
        problem = problem or f"the receiver answered {status}"
        if services.clock.now() + in_s > delivery.created_at + TRIED_S:
            outcome = f"given up after {delivery.tries} tries: {problem}"
    delivery.ended = bool(outcome)
    webhooks.write(delivery)
    what = f"{delivery.id} ({delivery.event} of {delivery.batch_id})"
    if outcome:
        services.due.finish(claim)
        log.info("webhook %s: %s", what, outcome, extra={"action": "webhook"})
    else:
        services.due.release(claim, in_s * 1000)
        message, again = "webhook %s: try %d: %s; again in %d s", {"action": "webhook_again"}
        log.warning(message, what, delivery.tries, problem, in_s, extra=again)
    return status > 0


@dataclass(slots=True)
class _Endpoint:
    running: int = 0
    waiting: deque[Lease[Claim]] = field(default_factory=deque)
    #: Whether it answered the last try.
    proved: bool = False
    #: Tries in a row without an answer, and the time until which it is paused (monotonic).
    unanswered: int = 0
    paused_until: float = 0.0
    #: Postponed deliveries that were not tried since.
    postponed: int = 0
    used_at: float = 0.0


class WaitingDeliveries:
    """Decides which endpoint's delivery is tried next. Only one thread may use it."""

    def __init__(self) -> None:
        self._endpoints: dict[str, _Endpoint] = {}
        self._running = 0
        self._waiting = 0

    @property
    def has_room(self) -> bool:
        return self._running < AT_ONCE and self._waiting < WAITING

    def add(self, delivery: Lease[Claim], endpoint_id: str) -> float:
        """Queue a delivery and return 0, or return the seconds by which to postpone it."""
        now = time.monotonic()
        endpoint = self._endpoints.setdefault(endpoint_id, _Endpoint())
        endpoint.used_at = now
        no_room = len(endpoint.waiting) >= WAITING_FOR_ONE or self._waiting >= WAITING
        if no_room or now < endpoint.paused_until:
            endpoint.postponed += 1
            in_s = max(LATER_S, endpoint.paused_until - now)
            return in_s + min(LATEST_S, endpoint.postponed * STEP_S)
        endpoint.waiting.append(delivery)
        self._waiting += 1
        return 0

    def next(self) -> Iterator[tuple[str, Lease[Claim]]]:
        """Yield each (endpoint id, delivery) to try now; it then counts as running."""
        any_begun = True
        while any_begun:
            any_begun = False
            for name, endpoint in list(self._endpoints.items()):
                if self._running >= AT_ONCE:
                    return
                if endpoint.waiting and self._may_try(endpoint):
                    any_begun = True
                    # Moves the endpoint to the end.
                    self._endpoints[name] = self._endpoints.pop(name)
                    self._waiting -= 1
                    self._running += 1
                    endpoint.running += 1
                    yield name, endpoint.waiting.popleft()

    def _may_try(self, endpoint: _Endpoint) -> bool:
        if endpoint.proved:
            return endpoint.running < FOR_ONE
        unproved = sum(each.running for each in self._endpoints.values() if not each.proved)
        return not endpoint.running and unproved < FOR_UNPROVED

    def end_try(self, endpoint_id: str, *, answered: bool) -> list[tuple[Lease[Claim], float]]:
        """Note the end of a try; return deliveries to postpone, with the seconds."""
        now = time.monotonic()
        endpoint = self._endpoints[endpoint_id]
        self._running -= 1
        endpoint.running -= 1
        endpoint.used_at, endpoint.postponed = now, max(0, endpoint.postponed - 1)
        endpoint.proved = answered
        if answered:
            endpoint.unanswered, endpoint.paused_until = 0, 0.0
            return []
        endpoint.unanswered += 1
        if endpoint.unanswered < PAUSED_AFTER:
            return []
        wait_s = WAITS_S[min(endpoint.unanswered - PAUSED_AFTER, len(WAITS_S) - 1)]
        endpoint.paused_until = now + wait_s
        postponed = self._clear(endpoint)
        endpoint.postponed += len(postponed)
        return [(delivery, wait_s + n * STEP_S) for n, delivery in enumerate(postponed)]

    def clear(self) -> list[Lease[Claim]]:
        """Remove and return all waiting deliveries."""
        return [lease for endpoint in self._endpoints.values() for lease in self._clear(endpoint)]

    def _clear(self, endpoint: _Endpoint) -> list[Lease[Claim]]:
        waiting, endpoint.waiting = list(endpoint.waiting), deque()
        self._waiting -= len(waiting)
        return waiting

    def forget_idle(self) -> None:
        before = time.monotonic() - FORGOTTEN_S
        for name, endpoint in list(self._endpoints.items()):
            if endpoint.used_at < before and not endpoint.running and not endpoint.waiting:
                del self._endpoints[name]


class DeliveryPool:
    """This process's leased deliveries, which wait for a turn or are tried."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._webhooks = Webhooks.using(services.batches)
        self._lease_ms = round(LEASE_S * 1000)
        renew = partial(services.due.renew, lease_ms=self._lease_ms)
        self._leases: Leases[Claim] = Leases(renew, LEASE_S)
        self._running: dict[Future[bool], tuple[str, Lease[Claim]]] = {}
        self._deliveries = WaitingDeliveries()

    def take(self) -> int:
        """Begin the tries whose turn it is; return their number."""
        for _ in range(CLAIMS):
            if not self._deliveries.has_room or not self._claim():
                break
        return sum(map(self._begin, self._deliveries.next()))

    def _claim(self) -> bool:
        """Claim due deliveries; return whether there were any."""
        claims = self._services.due.claim("webhook", self._lease_ms, TAKEN)
        for claim in claims:
            delivery = self._webhooks.delivery(claim.id)
            if delivery is None or delivery.ended:
                self._services.due.finish(claim)
                continue
            lease = self._leases.hold(claim)
            if in_s := self._deliveries.add(lease, delivery.endpoint_id):
                self._postpone([(lease, in_s)])
        return bool(claims)

    def _postpone(self, deliveries: list[tuple[Lease[Claim], float]]) -> None:
        # The renewals end first: if Redis is unreachable, all these leases expire.
        for lease, _ in deliveries:
            self._leases.drop(lease)
        for lease, in_s in deliveries:
            self._services.due.release(lease.claim, round(in_s * 1000))

    def _begin(self, turn: tuple[str, Lease[Claim]]) -> int:
        future: Future[bool] = Future()
        self._running[future] = turn
        # The thread is a daemon: a receiver that does not answer must not keep the gateway alive.
        thread = threading.Thread(
            target=self._try, args=(turn[1].claim, future), name="webhook", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # no more threads can be started now
            future.set_exception(error)
        return 1

    def _try(self, claim: Claim, future: Future[bool]) -> None:
        try:
            future.set_result(_deliver(self._services, claim))
        except Exception as error:
            future.set_exception(error)

    def wait(self, for_s: float) -> bool:
        """Wait for a try to end; return whether any try still runs."""
        if self._running:
            wait(self._running, for_s, FIRST_COMPLETED)
        for done in [future for future in self._running if future.done()]:
            endpoint_id, lease = self._running.pop(done)
            self._leases.drop(lease)
            error = done.exception()
            if isinstance(error, StoreUnavailable):  # the lease expires
                text = f"webhook {lease.claim.id}: {error.message}"
                log.warning("%s", text, extra={"action": "webhook"})
            elif error is not None:
                name = lease.claim.id
                log.error("webhook %s", name, exc_info=error, extra={"action": "webhook"})
            answered = error is None and done.result()
            self._postpone(self._deliveries.end_try(endpoint_id, answered=answered))
        self._deliveries.forget_idle()
        return bool(self._running)

    def close(self) -> None:
        """Release waiting deliveries; a running try keeps its lease until it ends."""
        for future, (_, lease) in self._running.items():
            future.add_done_callback(partial(self._drop, lease))
        self._postpone([(lease, 0) for lease in self._deliveries.clear()])

    def _drop(self, lease: Lease[Claim], _: Future[bool]) -> None:
        self._leases.drop(lease)


def _deliver_until(services: Services, stop: threading.Event) -> None:
    pool = DeliveryPool(services)
    while not stop.is_set():
        busy: int | bool = False
        try:
            busy = pool.take() or pool.wait(LOOK_S)
        except StoreUnavailable as error:
            log.warning("webhooks wait for Redis: %s", error.message, extra={"action": "webhook"})
        except Exception:  # one bad record must not end all deliveries
            log.exception("webhooks cannot be delivered now", extra={"action": "webhook"})
        if not busy:
            stop.wait(LOOK_S)
    try:
        pool.close()
    except StoreUnavailable as error:
        log.warning("webhooks are not released: %s", error.message, extra={"action": "webhook"})


@asynccontextmanager
async def delivering(services: Services) -> AsyncIterator[None]:
    """Deliver webhooks in a thread while the context is open."""
    stop = threading.Event()
    thread = threading.Thread(
        target=_deliver_until, args=(services, stop), name="webhooks", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        stop.set()
        await asyncio.to_thread(thread.join, 2 * LOOK_S + 1)
