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


class NextPop(NamedTuple):
    """How many requests to ask for, and the seconds until then; infinite: more must end first."""

    requests: int
    pause_s: float


class Refill:
    """When to send the next POP, and for how many requests.

    Half of the look-ahead must be free (`low_water`), so that one POP takes many requests. With
    long answers that takes a second. An online request must not wait for it in Redis: its arrival
    is noted (`online_arrived`) and it is taken immediately. For a minute after one, batches leave
    a few places free (`reserved`), and POPs are frequent, because not every online request has
    the highest priority, whose arrivals are noted. A batch alone costs no further POPs.
    """

    def __init__(self) -> None:
        self._asked = self._online = -math.inf  # time.monotonic()
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
        online = now - self._online <= ONLINE_FOR_S
        for_batches = free - limits.reserved if online else free
        if self._arrived and free > 0:
            return NextPop(max(1, for_batches), 0.0)
        if for_batches >= limits.low_water:
            return NextPop(for_batches, 0.0)
        if for_batches <= 0 or not online:
            return NextPop(0, math.inf)
        return NextPop(for_batches, max(0.0, self._asked + QUICK_S - now))
