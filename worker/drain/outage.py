"""Whether Redis answers."""

import time

from worker.drain.events import Events, RedisBack, RedisLost


class Outage:
    """Publishes when Redis no longer answers and when it does again, once for each outage."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._since: float | None = None

    @property
    def lasts(self) -> bool:
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
