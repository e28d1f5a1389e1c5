"""Reads every few seconds which lists POP takes first, so that batches meet their deadlines.

The order is computed in contract/deadlines.py. It is read in a thread, on a connection that is
opened when the queue has its first deadline.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from contract.redis.connect import connect
from contract.redis.deadlines import DeadlineReads
from worker.drain.drain import Drain
from worker.drain.scripts import ERRORS

log = logging.getLogger(__name__)

#: Least seconds between two reads.
EVERY_S = 3.0
#: A read that took t seconds is followed by a pause of at least t times this: a worker spends at
#: most 1 % of its time on reads, however many lists wait.
PAUSE_FOR_READ = 100
#: Most lists that POP takes first, and so most bytes of their names in each call.
MOST_URGENT = 50
#: Pauses after which the next read has been made at the latest: on a busy machine it is late.
LATE_READ = 3

#: Returns the keys of the urgent lists of a queue.
Read = Callable[[str], tuple[str, ...]]


class DeadlineOrder:
    """Keeps `drain.urgent`; without Redis it keeps the lists of the last read."""

    def __init__(self, drain: Drain, read: Read | None = None) -> None:
        self._drain = drain
        self._read = read or self._read_redis
        self._reads: DeadlineReads | None = None
        self._failed = False
        self.pause_s = EVERY_S

    async def run(self) -> None:
        """Read until cancelled."""
        try:
            while True:
                await asyncio.sleep(self.pause_s)
                try:
                    await self.read_once()
                except ERRORS as error:
                    self._drain.outage.lost(error)
                except Exception:  # another program may have written malformed data into Redis
                    if not self._failed:
                        log.exception("no order of deadlines", extra={"action": "no_deadlines"})
                    self._failed = True
        finally:
            if self._reads is not None:
                self._reads.close()

    async def read_once(self) -> None:
        """Read the order, if the queue has deadlines, and set the pause after it."""
        leases = self._drain.leases
        urgent: tuple[str, ...] = ()
        began = time.monotonic()
        if await leases.has_deadlines():
            urgent = await asyncio.to_thread(self._read, leases.queue)
        self._drain.urgent = urgent[:MOST_URGENT]
        self.pause_s = max(EVERY_S, PAUSE_FOR_READ * (time.monotonic() - began))

    def _read_redis(self, queue: str) -> tuple[str, ...]:
        if self._reads is None:
            settings, name = self._drain.settings, f"warmq-{self._drain.leases.worker_id}-deadlines"
            url = settings.redis_url.get_secret_value()
            self._reads = DeadlineReads(connect(url, name, 0, settings.redis_timeout_s))
        return self._reads.deadline_order(queue, LATE_READ * self.pause_s).order.urgent
