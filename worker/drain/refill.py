"""Decides when the drain asks Redis for more requests, and for how many."""

import asyncio
import math
import time
from collections.abc import Iterable
from typing import NamedTuple

from contract.message import Delivery
from worker.drain.admission import AdmissionLimits

#: Seconds after an online request in which the next one is expected.
ONLINE_FOR_S = 60.0
#: Seconds between two POPs meanwhile, if few places are free.
QUICK_S = 0.05
#: Few requests end if at most one in so many slots does between two of these POPs, on average.
FEW = 32
#: Of so many slots batches leave one free meanwhile, if few requests end.
FREE = 128
#: Seconds over which ended requests are counted: answers of one length end together, then none do.
COUNTED_S = 5.0


class NextPop(NamedTuple):
    """How many requests to ask for, and the seconds until then; infinite: more must end first."""

    requests: int
    pause_s: float


class Refill:
    """When to send the next POP, and for how many requests.

    Half of the look-ahead must be free (`low_water`), so that one POP takes many requests. With
    long answers that takes a second. An online request must not wait for it in Redis: its arrival
    is noted (`online_arrived`) and it is taken immediately. For a minute after one, batches leave
    places free (`_reserved`), and POPs are frequent, because not every online request has
    the highest priority, whose arrivals are noted. A batch alone costs no further POPs.
    """

    def __init__(self) -> None:
        self._asked = self._online = -math.inf  # time.monotonic()
        #: Free places, as last seen; and requests ended since a time.
        self._free = self._ended = 0
        self._since = time.monotonic()
        self._ended_per_s = 0.0
        #: Whether an online request may wait in Redis.
        self._arrived = False
        self._taken = asyncio.Event()

    async def online_arrived(self) -> None:
        """Note that an online request waits in Redis; return when a POP has found none."""
        self._arrived = True
        self._taken.clear()
        await self._taken.wait()

    def asked(self, deliveries: Iterable[Delivery]) -> None:
        """Note a POP, and the deliveries that it took."""
        self._asked = time.monotonic()
        if any(delivery.keep_ms is not None for delivery in deliveries):
            self._online = self._asked
        else:
            self._arrived = False
            self._taken.set()

    def next_pop(self, free: int, limits: AdmissionLimits) -> NextPop:
        """Return the next POP for this number of free places."""
        now = time.monotonic()
        self._count_ended(free, now)
        online = now - self._online <= ONLINE_FOR_S
        for_batches = free - self._reserved(limits) if online else free
        if self._arrived and free > 0:
            return NextPop(max(1, for_batches), 0.0)
        if for_batches >= limits.low_water:
            return NextPop(for_batches, 0.0)
        if for_batches <= 0 or not online:
            return NextPop(0, math.inf)
        return NextPop(for_batches, max(0.0, self._asked + QUICK_S - now))

    def _count_ended(self, free: int, now: float) -> None:
        self._ended += max(0, free - self._free)
        self._free = free
        if now - self._since >= COUNTED_S:
            self._ended_per_s = self._ended / (now - self._since)
            self._since, self._ended = now, 0

    def _reserved(self, limits: AdmissionLimits) -> int:
        """Return the places that batches leave free: the look-ahead and some slots, if few end.

        An online request passes those that wait in the engine, but not those in its slots. If many
        requests end, a slot is free in each step, and the look-ahead is needed to fill them.
        """
        if limits.one_step or self._ended_per_s * QUICK_S > limits.slots / FEW:
            return limits.reserved
        return limits.limit - limits.slots + limits.slots // FREE
