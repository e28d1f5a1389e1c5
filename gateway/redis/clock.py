"""Redis' clock, by which deadlines count, without a round trip for each look at it."""

from __future__ import annotations

import threading
import time

from contract.redis.reads import Reads

#: Redis is asked again after so long. In between this machine's clock that nobody sets counts on:
#: two such clocks drift apart by a millisecond in that time at most.
_ASK_S = 10.0


class Clock:
    """The time of one Redis. It may be used from several threads."""

    def __init__(self, redis: Reads) -> None:
        self._redis = redis
        self._lock = threading.Lock()
        self._asked_at = float("-inf")
        self._ahead_s = 0.0

    def now(self) -> float:
        """Return the time on Redis' clock, in seconds since 1970.

        Raises:
            StoreUnavailable: Redis has to be asked, and does not answer.
        """
        with self._lock:
            at = time.monotonic()
            if at - self._asked_at >= _ASK_S:
                now_s = self._redis.now_ms() / 1000
                self._asked_at = time.monotonic()
                self._ahead_s = now_s - (at + self._asked_at) / 2
            return time.monotonic() + self._ahead_s
