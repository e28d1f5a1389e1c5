"""What a worker tells of its work now and then; requests are not touched by it.

A line of the log every so often while it works, and one when its queue is empty. And minute by
minute what it did, into the ring that its queue has in Redis for a day: ten seconds are added up
here and written in one call; a write that fails is made with the next.
"""

import asyncio
import logging
import math
import time
from dataclasses import dataclass
from typing import Self

from worker.drain.counts import Counts
from worker.drain.drain import Drain
from worker.drain.events import Committed, Leased
from worker.drain.scripts import ERRORS

log = logging.getLogger(__name__)

LOOK_S = 1.0
#: Seconds from one line to the next while requests run; and at least, however often the queue
#: gets empty.
EVERY_S, LEAST_S = 30.0, 10.0
#: From one write into the ring to the next.
WRITE_S = 10.0


@dataclass(frozen=True, slots=True)
class _Mark:
    """Where a line's counts begin: time.monotonic(), and totals since the worker started."""

    at: float
    completed: int
    ended: int
    prompt_tokens: int
    completion_tokens: int

    @classmethod
    def of(cls, counts: Counts) -> Self:
        """Return the totals as they are now."""
        return cls(
            time.monotonic(), counts.completed, counts.ended, counts.prompt_tokens,
            counts.completion_tokens,
        )  # fmt: skip


class Progress:
    """Looks at the drain's counters now and then; requests are not touched by it."""

    def __init__(self, drain: Drain) -> None:
        self._drain = drain
        self._told_at = -math.inf
        self._was_empty = True
        #: Since when there is something to tell; None while the queue is empty and that was told.
        self._mark: _Mark | None = None
        self._ended_at = 0.0
        drain.events.subscribe(Leased, self._leased)
        drain.events.subscribe(Committed, self._committed)

    def _leased(self, _: Leased) -> None:
        if self._mark is None:
            self._mark = _Mark.of(self._drain.counts)

    def _committed(self, _: Committed) -> None:
        self._ended_at = time.monotonic()

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Tell if it is time to; what ends one moment and begins the next is not an empty queue."""
        mark = self._mark
        if mark is None or self._drain.lifecycle.stopping:
            return
        empty = not self._drain.in_flight and self._drain.wakeup.queue_empty.is_set()
        stays, self._was_empty = empty and self._was_empty, empty
        now = time.monotonic()
        due = stays if empty else now - max(mark.at, self._told_at) >= EVERY_S
        if not due or now - self._told_at < LEAST_S:
            return
        line = self._line(mark, self._ended_at if empty else now)
        self._told_at = now
        self._mark = None if stays else _Mark.of(self._drain.counts)
        log.info("%s; %s", line, await self._left(), extra={"action": "progress"})

    def _line(self, mark: _Mark, until: float) -> str:
        counts, seconds = self._drain.counts, max(until - mark.at, 0.001)
        answered = counts.completed - mark.completed
        wrote = (counts.completion_tokens - mark.completion_tokens) / seconds
        read = (counts.prompt_tokens - mark.prompt_tokens) / seconds
        line = (
            f"{answered:,} answered in {seconds:.1f} s: {answered / seconds:.1f} a second, "
            f"{wrote:,.0f} tokens a second written, {read:,.0f} read"
        )
        unanswered = counts.ended - mark.ended - answered
        return f"{line}; {unanswered:,} failed or cancelled" if unanswered else line

    async def _left(self) -> str:
        try:
            waiting = await self._drain.leases.waiting()
        except ERRORS:  # the drain's own commands say that Redis is away
            return f"{len(self._drain.in_flight):,} in flight"
        if not waiting and not self._drain.in_flight:
            return "the queue is empty"
        return f"{len(self._drain.in_flight):,} in flight, {waiting:,} waiting"


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
        slots, running = self._drain.limits.slots, len(self._drain.in_flight)
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
