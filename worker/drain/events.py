"""What happens in a drain, told to whoever subscribed: counters, the log, streams of text.

The events are a closed set. Those of requests come in groups, as Redis is asked: one for a POP,
one for a DONE, so that nobody pays for a request that nobody looks at.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from contract.message import Delivery
from worker.drain.endings import Ending
from worker.engine import Capacity

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Leased:
    """A POP brought these requests; `now` is Redis' time in seconds."""

    deliveries: Sequence[Delivery]
    now: float


@dataclass(frozen=True, slots=True)
class Started:
    """A request was checked and is given to the engine."""

    delivery: Delivery


@dataclass(frozen=True, slots=True)
class FirstText:
    """Text of a request that somebody listens to was seen for the first time in this attempt.

    `after_s` counts from its lease to the look that found the text (running_text.PAUSE_S apart).
    """

    delivery: Delivery
    after_s: float


@dataclass(frozen=True, slots=True)
class Committed:
    """These endings are in Redis."""

    endings: Sequence[Ending]


@dataclass(frozen=True, slots=True)
class HandedBack:
    """These requests are in the queue again; `died` are the leases that an engine died with."""

    deliveries: Sequence[Delivery]
    died: frozenset[str]


@dataclass(frozen=True, slots=True)
class LeasesLost:
    """Other workers have these requests now; their work here is aborted."""

    deliveries: Sequence[Delivery]


@dataclass(frozen=True, slots=True)
class Swept:
    """So many requests of dead workers were put back into the queue."""

    count: int


@dataclass(frozen=True, slots=True)
class EngineReady:
    """An engine has started, for the first time or in the place of a dead one."""

    seconds: float
    capacity: Capacity
    rebuilt: bool


@dataclass(frozen=True, slots=True)
class EngineDied:
    """The engine can run nothing any more."""

    reason: str


@dataclass(frozen=True, slots=True)
class RedisLost:
    """Redis does not answer, or with errors."""

    reason: str


@dataclass(frozen=True, slots=True)
class RedisBack:
    """Redis answers again, after so many seconds."""

    away_s: float


@dataclass(frozen=True, slots=True)
class Stopping:
    """The worker was told to stop; what is in flight may take `within_s` seconds to end. Told
    again, or not to wait, it hands everything back at once: 0."""

    in_flight: int
    within_s: float


@dataclass(frozen=True, slots=True)
class Drained:
    """Nothing is in flight; since the stop began so many requests have ended here, and so many
    are in the queue again."""

    ended: int
    handed_back: int


@dataclass(frozen=True, slots=True)
class Stopped:
    """The engine has ended too."""


Event = (
    Leased | Started | FirstText | Committed | HandedBack | LeasesLost | Swept
    | EngineReady | EngineDied | RedisLost | RedisBack
    | Stopping | Drained | Stopped
)  # fmt: skip
E = TypeVar("E", bound=Event)
Listener = Callable[[Any], None]


class Events:
    """Calls the listeners of each kind of event, in the order in which they subscribed.

    On the drain's loop only. A listener that raises is logged: the drain goes on without it.
    """

    def __init__(self) -> None:
        self._listeners: dict[type, tuple[Listener, ...]] = {}

    def subscribe(self, kind: type[E], listener: Callable[[E], None]) -> None:
        """Call the listener with every event of this kind from now on."""
        self._listeners[kind] = (*self.subscribers(kind), listener)

    def unsubscribe(self, kind: type[E], listener: Callable[[E], None]) -> None:
        """Call it no more."""
        self._listeners[kind] = tuple(one for one in self.subscribers(kind) if one != listener)

    def subscribers(self, kind: type) -> tuple[Listener, ...]:
        """Return who listens; for nobody, an event that is costly to make need not be made."""
        return self._listeners.get(kind, ())

    def publish(self, event: Event) -> None:
        """Tell the listeners, now."""
        for listener in self._listeners.get(type(event), ()):
            try:
                listener(event)
            except Exception:
                log.exception("a listener failed", extra={"action": "listener_failed"})


class Outage:
    """Publishes when Redis no longer answers and when it does again, once for each outage."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._since: float | None = None

    @property
    def ongoing(self) -> bool:
        """Whether there is one now."""
        return self._since is not None

    def lost(self, error: Exception) -> None:
        """Note that a command failed."""
        if self._since is None:
            self._since = time.monotonic()
            self._events.publish(RedisLost(str(error)))

    def over(self) -> None:
        """Note that a command was answered."""
        if self._since is not None:
            away_s, self._since = time.monotonic() - self._since, None
            self._events.publish(RedisBack(away_s))
