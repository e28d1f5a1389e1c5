"""Takes deliveries whose time has come, and tries them; whichever gateway lives does.

Endpoints take turns: no receiver holds more than two of this process' tries. A receiver that
answered the last time may have two tries at once, and places that no other one can take. All others
have one try each and share a part of the places. One that does not answer in time, twice in a row,
waits as a whole: all that is for it. It is then tried with one delivery, and waits longer each time
until it answers. This is about receivers in one process: several gateways find it out each for
itself.
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
from gateway.http.services import Services
from gateway.redis.leases import Lease, Leases
from gateway.redis.webhooks import TRIED_S, Delivery, Webhooks
from gateway.settings import LEASE_S
from gateway.webhooks.posting import NotDelivered, body_of, headers_of, post

log = logging.getLogger(__name__)

#: Seconds from one try to the next; the last one stands for all that follow, for three days.
BACKOFF_S = (5, 30, 120, 600, 1800, 3600, 7200, 14400, 28800)
#: Deliveries that are taken from Redis in one call, and calls before what was taken is tried.
TAKEN, LOOKS = 50, 10
#: How often Redis is asked for deliveries.
LOOK_S = 0.5
#: Tries at a time in one gateway, for one endpoint that answered the last time, and for all
#: endpoints that did not or are new: a receiver that does not answer holds one for 10 s.
AT_ONCE, FOR_ONE, FOR_UNPROVED = 32, 2, 16
#: Deliveries that are held here until it is their endpoint's turn: of one, and of all.
HELD_FOR_ONE, HELD = 50, 1000
#: An endpoint that has not answered so often in a row waits; each time for so many seconds.
SILENT_AFTER = 2
WAITS_S = (5.0, 30.0, 120.0, 300.0)
#: What finds no place is looked at again after so long, and each further one a little later.
LATER_S, STEP_S, LATEST_S = 1.0, 0.02, 60.0
#: What is known of an endpoint that is idle is forgotten after so long.
FORGOTTEN_S = 3600.0


def _deliver(services: Services, claim: Claim) -> bool:
    """Try one delivery, and say when it is to be tried again; return whether it was answered."""
    webhooks = Webhooks.using(services.batches)
    delivery = webhooks.delivery(claim.id)
    endpoint = webhooks.get(delivery.endpoint_id) if delivery else None
    if delivery is None or delivery.ended or endpoint is None:
        services.due.finish(claim)
        return True
    set_log_fields(batch_id=delivery.batch_id)
    body = body_of(delivery)
    headers = headers_of(delivery, body, endpoint.secret, int(time.time()))
    status, told = 0, ""
    try:
        private = services.settings.gateway_private_webhooks
        status = post(endpoint.url, body, headers, private=private)
    except NotDelivered as error:
        told = str(error)
    delivery.tries += 1
    if 200 <= status < 300:
        _end(services, claim, delivery, f"delivered at try {delivery.tries}")
    elif status == 410:
        webhooks.delete(endpoint.id)
        _end(services, claim, delivery, "the receiver answered 410: its endpoint is removed")
    else:
        _again(services, claim, delivery, told or f"the receiver answered {status}")
    return status > 0


def _end(services: Services, claim: Claim, delivery: Delivery, told: str) -> None:
    delivery.ended = True
    Webhooks.using(services.batches).write(delivery)
    services.due.finish(claim)
    log.info(
        "webhook %s (%s of %s): %s",
        delivery.id,
        delivery.event,
        delivery.batch_id,
        told,
        extra={"action": "webhook"},
    )


def _again(services: Services, claim: Claim, delivery: Delivery, told: str) -> None:
    in_s = BACKOFF_S[min(delivery.tries, len(BACKOFF_S)) - 1]
    if services.clock.now() + in_s > delivery.created_at + TRIED_S:
        _end(services, claim, delivery, f"given up after {delivery.tries} tries: {told}")
        return
    Webhooks.using(services.batches).write(delivery)
    services.due.release(claim, in_s * 1000)
    log.warning(
        "webhook %s (%s of %s): try %d: %s; again in %d s",
        delivery.id, delivery.event, delivery.batch_id, delivery.tries, told, in_s,
        extra={"action": "webhook_again"},
    )  # fmt: skip


@dataclass(slots=True)
class _Endpoint:
    running: int = 0
    held: deque[Lease[Claim]] = field(default_factory=deque)
    #: Whether it answered the last time.
    proved: bool = False
    #: Tries in a row that were not answered in time, and until when it waits (monotonic).
    silent: int = 0
    until: float = 0.0
    #: Deliveries that were sent away since it was idle.
    away: int = 0
    used: float = 0.0

    def busy(self) -> bool:
        return self.running >= (FOR_ONE if self.proved else 1)


class Turns:
    """Whose turn it is in this process. For one thread alone."""

    def __init__(self) -> None:
        self._endpoints: dict[str, _Endpoint] = {}
        self._running = 0
        self._held = 0

    @property
    def room(self) -> bool:
        """Whether more can be taken in."""
        return self._running < AT_ONCE and self._held < HELD

    def take_in(self, delivery: Lease[Claim], endpoint_id: str) -> float:
        """Hold a delivery until its turn; return 0, or after how many seconds it is to come."""
        now = time.monotonic()
        one = self._endpoints.setdefault(endpoint_id, _Endpoint())
        one.used = now
        if now < one.until or len(one.held) >= HELD_FOR_ONE or self._held >= HELD:
            one.away += 1
            return max(LATER_S, one.until - now) + min(LATEST_S, one.away * STEP_S)
        one.held.append(delivery)
        self._held += 1
        return 0

    def next(self) -> Iterator[tuple[str, Lease[Claim]]]:
        """Yield (endpoint, delivery) to be tried now; each counts as running."""
        found = True
        while found:
            found = False
            for name, one in list(self._endpoints.items()):
                if self._running >= AT_ONCE:
                    return
                if one.held and not one.busy() and not self._unproved_are_many(one):
                    found = True
                    self._endpoints[name] = self._endpoints.pop(name)  # its next turn is the last
                    self._held -= 1
                    self._running += 1
                    one.running += 1
                    yield name, one.held.popleft()

    def _unproved_are_many(self, asks: _Endpoint) -> bool:
        running = sum(one.running for one in self._endpoints.values() if not one.proved)
        return not asks.proved and running >= FOR_UNPROVED

    def ended(self, endpoint_id: str, *, answered: bool) -> list[tuple[Lease[Claim], float]]:
        """Note the end of a try; return what is sent away, and for how many seconds."""
        now = time.monotonic()
        one = self._endpoints[endpoint_id]
        self._running -= 1
        one.running -= 1
        one.used, one.away = now, max(0, one.away - 1)
        one.proved = answered
        if answered:
            one.silent, one.until = 0, 0.0
            return []
        one.silent += 1
        if one.silent < SILENT_AFTER:
            return []
        one.until = now + WAITS_S[min(one.silent - SILENT_AFTER, len(WAITS_S) - 1)]
        sent = self._clear(one)
        one.away += len(sent)
        return [(held, one.until - now + n * STEP_S) for n, held in enumerate(sent)]

    def clear(self) -> list[Lease[Claim]]:
        """Hold nothing more; return what was held."""
        return [held for one in self._endpoints.values() for held in self._clear(one)]

    def _clear(self, one: _Endpoint) -> list[Lease[Claim]]:
        held = list(one.held)
        one.held.clear()
        self._held -= len(held)
        return held

    def forget_idle(self) -> None:
        """Forget endpoints that have had nothing for long."""
        before = time.monotonic() - FORGOTTEN_S
        for name, one in list(self._endpoints.items()):
            if one.used < before and not one.running and not one.held:
                del self._endpoints[name]


class DeliveryPool:
    """Deliveries that are under way in this process, each under its lease."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._webhooks = Webhooks.using(services.batches)
        self._lease_ms = round(LEASE_S * 1000)
        renew = partial(services.due.renew, lease_ms=self._lease_ms)
        self._leases: Leases[Claim] = Leases(renew, LEASE_S)
        self._running: dict[Future[bool], tuple[str, Lease[Claim]]] = {}
        self._turns = Turns()

    def take(self) -> int:
        """Begin what is due and has its turn; return how many tries that were."""
        for _ in range(LOOKS):
            if not self._turns.room or not self._take_in():
                break
        return sum(map(self._begin, self._turns.next()))

    def _take_in(self) -> bool:
        """Take deliveries whose time has come; return whether there were any."""
        claims = self._services.due.claim("webhook", self._lease_ms, TAKEN)
        for claim in claims:
            delivery = self._webhooks.delivery(claim.id)
            if delivery is None or delivery.ended:
                self._services.due.finish(claim)
                continue
            held = self._leases.hold(claim)
            if later_s := self._turns.take_in(held, delivery.endpoint_id):
                self._send_away([(held, later_s)])
        return bool(claims)

    def _send_away(self, sent: list[tuple[Lease[Claim], float]]) -> None:
        for held, _ in sent:  # all first: where Redis is away, their leases end by themselves
            self._leases.drop(held)
        for held, in_s in sent:
            self._services.due.release(held.claim, round(in_s * 1000))

    def _begin(self, turn: tuple[str, Lease[Claim]]) -> int:
        future: Future[bool] = Future()
        self._running[future] = turn
        # A daemon: a receiver that does not answer keeps no gateway from ending.
        thread = threading.Thread(
            target=self._try, args=(turn[1].claim, future), name="webhook", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # there is no thread for it now
            future.set_exception(error)
        return 1

    def _try(self, claim: Claim, future: Future[bool]) -> None:
        try:
            answered = _deliver(self._services, claim)
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(answered)

    def look(self, for_s: float) -> bool:
        """Wait for one to end; return whether any is under way."""
        if self._running:
            wait(self._running, for_s, FIRST_COMPLETED)
        for done in [future for future in self._running if future.done()]:
            endpoint_id, held = self._running.pop(done)
            self._leases.drop(held)
            error = done.exception()
            if isinstance(error, StoreUnavailable):
                log.warning(
                    "webhook %s: %s", held.claim.id, error.message, extra={"action": "webhook"}
                )  # its lease brings it back
            elif error is not None:
                log.error("webhook %s", held.claim.id, exc_info=error, extra={"action": "webhook"})
            answered = error is None and done.result()
            self._send_away(self._turns.ended(endpoint_id, answered=answered))
        self._turns.forget_idle()
        return bool(self._running)

    def close(self) -> None:
        """Give back what waits for its turn; what is being tried has its lease until it ends."""
        for future, (_, held) in self._running.items():
            future.add_done_callback(partial(self._drop, held))
        self._send_away([(held, 0) for held in self._turns.clear()])

    def _drop(self, held: Lease[Claim], _: Future[bool]) -> None:
        self._leases.drop(held)


def _deliver_until(services: Services, stop: threading.Event) -> None:
    current = DeliveryPool(services)
    while not stop.is_set():
        under_way: int | bool = False
        try:
            under_way = current.take() or current.look(LOOK_S)
        except StoreUnavailable as error:
            log.warning("webhooks wait for Redis: %s", error.message, extra={"action": "webhook"})
        except Exception:  # one bad record must not end the delivery of all others
            log.exception("webhooks", extra={"action": "webhook"})
        if not under_way:
            stop.wait(LOOK_S)
    try:
        current.close()
    except StoreUnavailable as error:
        log.warning("webhooks are not given back: %s", error.message, extra={"action": "webhook"})


@asynccontextmanager
async def delivering(services: Services) -> AsyncIterator[None]:
    """Deliver in a thread of this process for as long as the context is open."""
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
