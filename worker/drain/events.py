"""Defines a drain's events, and publishes them to subscribers: counters, the log, running text.

An event about several requests is published once for each POP or DONE.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from contract.message import Delivery
from worker.drain.endings import Ending
from worker.engine import Capacity

log = logging.getLogger(__name__)


class Leased(NamedTuple):
    """A POP returned these requests; `now` is Redis's time at the POP, in seconds."""

    deliveries: Sequence[Delivery]
    now: float


class Started(NamedTuple):
    """A request has been checked, and enters the engine."""

    delivery: Delivery


class FirstText(NamedTuple):
    """The first text of a request was published, `after_s` seconds after its task began."""

    delivery: Delivery
    after_s: float


class Committed(NamedTuple):
    """These endings are in Redis."""

    endings: Sequence[Ending]


class HandedBack(NamedTuple):
    """These requests are queued again; `died` names the leases that were in a dead engine."""

    deliveries: Sequence[Delivery]
    died: frozenset[str]


class LeasesLost(NamedTuple):
    """Other workers have these requests now; their work here is aborted."""

    deliveries: Sequence[Delivery]


class Swept(NamedTuple):
    """A sweep put this many requests of dead workers back into the queue."""

    requests: int


class EngineReady(NamedTuple):
    """An engine has started within `seconds`; `rebuilt` if it replaces a dead one."""

    seconds: float
    capacity: Capacity
    rebuilt: bool


class EngineDied(NamedTuple):
    """The engine has died, and can run no more requests."""

    reason: str


class RedisLost(NamedTuple):
    """Redis does not answer, or answers with errors."""

    reason: str


class RedisBack(NamedTuple):
    """Redis answers again, after `away_s` seconds."""

    away_s: float


class Stopping(NamedTuple):
    """The worker stops; requests in flight may finish within `within_s` seconds.

    With `within_s` 0 they are handed back now.
    """

    in_flight: int
    within_s: float


class Drained(NamedTuple):
    """No request is in flight; the counts are of requests since the stop began."""

    ended: int
    handed_back: int


class Stopped(NamedTuple):
    """The engine has ended."""


Event = (
    Leased | Started | FirstText | Committed | HandedBack | LeasesLost | Swept
    | EngineReady | EngineDied | RedisLost | RedisBack
    | Stopping | Drained | Stopped
)  # fmt: skip
E = TypeVar("E", bound=Event)
Subscriber = Callable[[Any], None]


class Events:
    """Calls the subscribers of each type of event in order, in the drain's event loop."""

    def __init__(self) -> None:
        self._subscribers: dict[type, tuple[Subscriber, ...]] = {}

    def subscribe(self, event_type: type[E], subscriber: Callable[[E], None]) -> None:
        """Call the subscriber with every event of this type from now on."""
        self._subscribers[event_type] = (*self.subscribers(event_type), subscriber)

    def unsubscribe(self, event_type: type[E], subscriber: Callable[[E], None]) -> None:
        """Do not call the subscriber any more."""
        remaining = (s for s in self.subscribers(event_type) if s != subscriber)
        self._subscribers[event_type] = tuple(remaining)

    def subscribers(self, event_type: type) -> tuple[Subscriber, ...]:
        """Return the subscribers of a type; without any, a costly event need not be made."""
        return self._subscribers.get(event_type, ())

    def publish(self, event: Event) -> None:
        """Call the event's subscribers now; log the errors that they raise."""
        for subscriber in self._subscribers.get(type(event), ()):
            try:
                subscriber(event)
            except Exception:
                log.exception("a subscriber of events failed", extra={"action": "listener_failed"})


class Outage:
    """Publishes an event when an outage of Redis begins, and one when it ends."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._since: float | None = None

    @property
    def ongoing(self) -> bool:
        """Whether there is an outage now."""
        return self._since is not None

    def lost(self, error: Exception) -> None:
        """Note that a Redis command failed."""
        if self._since is None:
            self._since = time.monotonic()
            self._events.publish(RedisLost(str(error)))

    def over(self) -> None:
        """Note that Redis answered a command."""
        if self._since is not None:
            away_s, self._since = time.monotonic() - self._since, None
            self._events.publish(RedisBack(away_s))
