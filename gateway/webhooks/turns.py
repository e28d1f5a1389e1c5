"""Endpoints take turns: no receiver holds more than two of this process' tries.

A receiver that answered the last time may have two tries at once, and places that no other one
can take. All others have one try each and share a part of the places. One that does not answer in
time, twice in a row, waits as a whole: all that is for it. It is then tried with one delivery, and
waits longer each time until it answers. This is about receivers in one process: several gateways
find it out each for itself.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from contract.redis.due import Claim
from gateway.redis.leases import Held

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


@dataclass(slots=True)
class _Endpoint:
    running: int = 0
    held: deque[Held[Claim]] = field(default_factory=deque)
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

    def take_in(self, delivery: Held[Claim], endpoint_id: str) -> float:
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

    def next(self) -> Iterator[tuple[str, Held[Claim]]]:
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

    def ended(self, endpoint_id: str, *, answered: bool) -> list[tuple[Held[Claim], float]]:
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
        sent = list(one.held)
        one.held.clear()
        self._held -= len(sent)
        one.away += len(sent)
        return [(held, one.until - now + n * STEP_S) for n, held in enumerate(sent)]

    def forget_idle(self) -> None:
        """Forget endpoints that have had nothing for long."""
        before = time.monotonic() - FORGOTTEN_S
        for name, one in list(self._endpoints.items()):
            if one.used < before and not one.running and not one.held:
                del self._endpoints[name]
