"""Decides when the drain asks Redis for more requests."""

import math
import time
from collections.abc import Iterable

from contract.message import Delivery

#: Seconds after an online request in which the next one is expected.
ONLINE_FOR_S = 60.0
#: Seconds between two POPs meanwhile, if few places are free.
QUICK_S = 0.05


class Refill:
    """When to send the next POP.

    Half of the look-ahead must be free (`low_water`), so that one POP takes many requests. With
    long answers that takes a second, in which an online request waits in Redis. So for a minute
    after an online request one free place is enough. A batch alone costs no further POPs.
    """

    def __init__(self) -> None:
        self._asked = self._online = -math.inf  # time.monotonic()

    def asked(self, deliveries: Iterable[Delivery]) -> None:
        """Note a POP, and the deliveries that it took."""
        self._asked = time.monotonic()
        if any(delivery.keep_ms is not None for delivery in deliveries):
            self._online = self._asked

    def pause_s(self, free: int, low_water: int) -> float:
        """Return the seconds until the next POP, for this number of free places.

        Infinite if more places must be free first.
        """
        if free >= low_water:
            return 0.0
        now = time.monotonic()
        if free <= 0 or now - self._online > ONLINE_FOR_S:
            return math.inf
        return max(0.0, self._asked + QUICK_S - now)
