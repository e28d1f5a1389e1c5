"""Reports a worker's throughput: as log lines, and as its queue's history in Redis.

The history is a hash with a field for each minute, used again after a day: a ring buffer
(worker/lua/ring.lua), not the ring of tenants in contract/lua/turns.lua.
"""

import asyncio
import logging
import math
import time
from copy import copy

from worker.drain.counts import Counts
from worker.drain.drain import Drain
from worker.drain.events import Committed, EngineReady, Leased
from worker.drain.scripts import ERRORS

log = logging.getLogger(__name__)

#: Seconds between two samples of the slots in use, and between two checks for a due log line.
SAMPLE_S = 1.0
#: Seconds between two log lines while requests run.
EVERY_S = 30.0
#: Fewest seconds between two log lines, also if the queue becomes empty more often.
LEAST_S = 10.0
#: Seconds between two writes into the history; a killed worker's last ones are lost.
WRITE_S = 2.0


class Progress:
    """Logs a line every EVERY_S seconds while requests run, and one when the queue is empty."""

    def __init__(self, drain: Drain) -> None:
        self._drain = drain
        self._logged_at = -math.inf
        self._was_empty = True
        #: The start of the time that the next log line covers, and the totals at that time. None
        #: after a line about the empty queue.
        self._covered_from: tuple[float, Counts] | None = None
        #: The time.monotonic() of the latest commit.
        self._ended_at = 0.0
        drain.events.subscribe(Leased, self._leased)
        drain.events.subscribe(Committed, self._committed)

    def _leased(self, _: Leased) -> None:
        if self._covered_from is None:
            self._covered_from = time.monotonic(), copy(self._drain.counts)

    def _committed(self, _: Committed) -> None:
        self._ended_at = time.monotonic()

    async def run(self) -> None:
        """Check every second until cancelled."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            await self.log_if_due()

    async def log_if_due(self) -> None:
        """Log a line if one is due; the queue counts as empty if two checks in a row find it so."""
        covered_from = self._covered_from
        if covered_from is None or self._drain.lifecycle.stopping:
            return
        empty = not self._drain.in_flight and self._drain.wakeup.queue_empty.is_set()
        still_empty, self._was_empty = empty and self._was_empty, empty
        now = time.monotonic()
        due = still_empty if empty else now - max(covered_from[0], self._logged_at) >= EVERY_S
        if not due or now - self._logged_at < LEAST_S:
            return
        line = self._line(*covered_from, self._ended_at if empty else now)
        self._logged_at = now
        self._covered_from = None if still_empty else (now, copy(self._drain.counts))
        log.info("%s; %s", line, await self._remaining(), extra={"action": "progress"})

    def _line(self, began: float, before: Counts, until: float) -> str:
        counts, seconds = self._drain.counts, max(until - began, 0.001)
        answered = counts.completed - before.completed
        written = (counts.completion_tokens - before.completion_tokens) / seconds
        read = (counts.prompt_tokens - before.prompt_tokens) / seconds
        line = (
            f"{answered:,} answered in {seconds:.1f} s: {answered / seconds:.1f} a second, "
            f"{written:,.0f} tokens a second written, {read:,.0f} read"
        )
        unanswered = counts.ended - before.ended - answered
        return f"{line}; {unanswered:,} failed or cancelled" if unanswered else line

    async def _remaining(self) -> str:
        in_flight = f"{len(self._drain.in_flight):,} in flight"
        try:
            waiting = await self._drain.leases.waiting()
        except ERRORS:  # other commands of the drain report the outage
            return in_flight
        if not waiting and not self._drain.in_flight:
            return "the queue is empty"
        return f"{in_flight}, {waiting:,} waiting"


def _period() -> int:
    """Return the number of the WRITE_S seconds in which the next sample is.

    A write is the last sample of its minute, so that no minute gets the work of the one before.
    """
    return int((time.time() + SAMPLE_S) // WRITE_S)


class History:
    """Adds the drain's counts to its queue's history in Redis (worker/lua/ring.lua)."""

    def __init__(self, drain: Drain) -> None:
        self._drain = drain
        self._written = self._totals()
        self._busy_s = self._slots_s = 0.0
        # Completed requests when the engine was ready; before its next answer it may be compiling.
        self._cold_at = drain.counts.completed
        drain.events.subscribe(EngineReady, self._engine_ready)

    async def run(self) -> None:
        """Sample and write until cancelled, and then once more."""
        loop = asyncio.get_running_loop()
        sampled, written = loop.time(), _period()
        try:
            while True:
                await asyncio.sleep(SAMPLE_S)
                now = loop.time()
                self.sample(now - sampled)
                sampled = now
                if (period := _period()) != written:
                    written = period
                    await self.write()
        finally:
            await self.write()

    def _engine_ready(self, _: EngineReady) -> None:
        self._cold_at = self._drain.counts.completed

    def sample(self, seconds: float) -> None:
        """Count the slots in use for each of the `seconds` since the last sample.

        Those before an engine's first answer are not counted: they would make the rate that is
        computed from the history many times too low.
        """
        slots, running = self._drain.limits.slots, len(self._drain.in_flight)
        self._drain.averages.update(running, slots, seconds)
        if self._drain.counts.completed > self._cold_at:
            self._busy_s += min(slots, running) * seconds
        self._slots_s += slots * seconds

    async def write(self) -> None:
        """Add the new counts to the history, if there are any; without an engine there are none."""
        totals, busy_s, slots_s = self._totals(), self._busy_s, self._slots_s
        new = [now - before for now, before in zip(totals, self._written, strict=True)]
        if not slots_s and not any(new):
            return
        try:
            await self._drain.leases.note_history([*new, round(busy_s), round(slots_s)])
        except ERRORS as error:
            log.debug("the last seconds are not in the history yet: %s", error)
            return
        self._written = totals
        self._busy_s, self._slots_s = self._busy_s - busy_s, self._slots_s - slots_s

    def _totals(self) -> list[int]:
        counts = self._drain.counts
        return [
            counts.completed, counts.ended - counts.completed, counts.prompt_tokens,
            counts.completion_tokens, self._drain.supervisor.cached_prompt_tokens(),
        ]  # fmt: skip
