"""Decides how long a swap waits for the last running requests of the model that it leaves.

While they end one by one, more and more slots are idle. Handing a request back loses the time that
it has run. Both are slot-seconds: a swap waits until the idle ones exceed those that would be lost.
So waiting costs at most twice what it would cost to wait for all.
"""

from collections.abc import Iterable

from worker.drain.in_flight import Running


class Tail:
    """The end of one stay with this number of slots; `look` is called every fraction of a second.

    A request is waited for in any case if it has been handed back before, so that a long one ends
    some time, or if a client reads its text.
    """

    def __init__(self, slots: int, now: float) -> None:
        self._slots, self._at = slots, now
        #: Slot-seconds that were idle since the swap began.
        self.idle_s = 0.0

    def look(self, running: Iterable[Running], now: float) -> bool:
        """Return whether it costs less to hand these requests back than to wait for them."""
        left = [one for one in running if not one.ended]
        self.idle_s += max(0, self._slots - len(left)) * (now - self._at)
        self._at = now
        if any(one.delivery.attempt > 1 or one.delivery.listener for one in left):
            return False
        lost_s = sum(now - one.since for one in left if one.since)
        return bool(left) and self.idle_s > lost_s
