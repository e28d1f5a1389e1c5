"""Decides how long a swap waits for the last running requests of the model that it leaves.

While these requests end one by one, more and more slots are idle. Handing a request back loses the
time for which it has run. Both costs are counted in slot-seconds: the swap waits until the idle
ones exceed those that handing back would lose. So a swap costs at most twice as much as it would
cost to wait for all requests.
"""

from collections.abc import Iterable

from worker.drain.in_flight import Running


class Tail:
    """The end of one stay with this number of slots; `look` is called every fraction of a second.

    The swap always waits for a request that was delivered before, because a long one would be
    handed back again and again, and for a request whose text a client reads.
    """

    def __init__(self, slots: int, now: float) -> None:
        self._slots, self._at = slots, now
        #: Slot-seconds that were idle since the swap began.
        self.idle_s = 0.0

    def look(self, running: Iterable[Running], now: float) -> bool:
        """Return whether it costs less to hand these requests back than to wait for them."""
        unended = [one for one in running if not one.ended]
        self.idle_s += max(0, self._slots - len(unended)) * (now - self._at)
        self._at = now
        if any(one.delivery.attempt > 1 or one.delivery.listener for one in unended):
            return False
        lost_s = sum(now - one.since for one in unended if one.since)
        return bool(unended) and self.idle_s > lost_s
