"""What this worker did, minute by minute, into the ring that its queue has in Redis for a day.

Ten seconds are added up here and written in one call; a write that fails is made with the next.
"""

import asyncio
import logging

from worker.drain.drain import Drain
from worker.drain.scripts import ERRORS

log = logging.getLogger(__name__)

LOOK_S, WRITE_S = 1.0, 10.0


class History:
    """Adds up a drain's counters; requests are not touched by it."""

    def __init__(self, drain: Drain) -> None:
        self._drain = drain
        self._written = self._totals()
        self._busy_s = self._slots_s = 0.0

    async def run(self) -> None:
        """Look and write until cancelled."""
        loop = asyncio.get_running_loop()
        looked = written = loop.time()
        while True:
            await asyncio.sleep(LOOK_S)
            now = loop.time()
            self.look(now - looked)
            looked = now
            if now - written >= WRITE_S:
                written = now
                await self.write()

    def look(self, seconds: float) -> None:
        """Count the slots for as long as it is since the last look."""
        slots, running = self._drain.room.slots, len(self._drain.in_flight)
        self._drain.means.look(running, slots, seconds)
        self._busy_s += min(slots, running) * seconds
        self._slots_s += slots * seconds

    async def write(self) -> None:
        """Add what is new to the ring; nothing if this worker had no engine meanwhile."""
        drain = self._drain
        totals, busy_s, slots_s = self._totals(), self._busy_s, self._slots_s
        new = [now - before for now, before in zip(totals, self._written, strict=True)]
        if not slots_s and not any(new):
            return
        told = [*new, round(busy_s), round(slots_s)]
        try:
            await drain.leases.note_history(told)
        except ERRORS as error:
            log.debug("the last seconds are not in the ring yet: %s", error)
            return
        self._written = totals
        self._busy_s, self._slots_s = self._busy_s - busy_s, self._slots_s - slots_s

    def _totals(self) -> list[int]:
        counts = self._drain.counts
        return [
            counts.completed,
            counts.ended - counts.completed,
            counts.prompt_tokens,
            counts.completion_tokens,
            self._drain.supervisor.cached_prompt_tokens(),
        ]
