"""How much one worker takes at once, and who waits for whom."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from worker.engine import Capacity, multi_sequence_slots
from worker.settings import WorkerSettings

#: Messages up to this size need not wait: reading one takes less than a millisecond.
LARGE_BYTES = 16_384


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Requests: `slots` run in the engine, `limit` are in flight at most, and the loop asks Redis
    for more once `low_water` of them are free. `context` is in tokens, 0 where it is not known."""

    slots: int = 0
    limit: int = 0
    low_water: int = 1
    context: int = 0

    @classmethod
    def of(cls, capacity: Capacity, settings: WorkerSettings) -> AdmissionLimits:
        """Return the room of an engine under these settings."""
        slots, look_ahead = capacity.max_num_seqs, settings.look_ahead
        if look_ahead is None:
            # Where all slots are free at once, those of the next step wait already while others
            # are fetched; with a quarter of them every other step would be a quarter full.
            look_ahead = max(8, 2 * slots if capacity.one_step else slots // 4)
        limit = slots + look_ahead
        # Refilling in groups of half the look-ahead halves the POPs at no loss of occupancy.
        low_water = max(1, min(look_ahead // 2, limit))
        return cls(slots, limit, low_water, capacity.max_model_len)

    @property
    def slots_of_many(self) -> int:
        """The slots that requests of many sequences may take: a single one soon finds another."""
        return multi_sequence_slots(self.slots)

    @property
    def preparing_each(self) -> int:
        """Of a tenant of which so many requests are being prepared no more are leased: they are
        next, and those of others pass. They are in no slot, and are as many as the look-ahead."""
        return max(1, self.limit - self.slots)

    @property
    def many_waiting(self) -> int:
        """How many requests of many sequences may wait here for slots; a quarter of those that
        wait, so that single ones are leased, too."""
        return max(1, (self.limit - self.slots) // 4)


class Sequences:
    """Bounds the sequences that requests of more than one bring into the engine at a time.

    A request of one sequence never waits here: the room counts it. The others enter in the order in
    which they came, up to `limit` sequences in sum. One that is larger than the limit enters once
    no other of them is inside, so none waits forever. `let_in` is called when a waiter
    has entered.
    """

    def __init__(self, limit: Callable[[], int], let_in: Callable[[], None] = lambda: None) -> None:
        self._limit, self._told = limit, let_in
        self._inside = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return len(self._waiting)

    @asynccontextmanager
    async def entered(self, count: int) -> AsyncIterator[None]:
        """Hold so many sequences; waits until there is room for them."""
        if count <= 1:
            yield
            return
        await self._enter(count)
        try:
            yield
        finally:
            self._inside -= count
            self._let_in()

    async def _enter(self, count: int) -> None:
        turn = (count, asyncio.get_running_loop().create_future())
        self._waiting.append(turn)
        self._let_in()
        if turn[1].done():
            return
        try:
            await turn[1]
            self._told()
        except asyncio.CancelledError:
            if turn in self._waiting:
                self._waiting.remove(turn)
            elif turn[1].done() and not turn[1].cancelled():  # let in just now
                self._inside -= count
            self._let_in()
            raise

    def _let_in(self) -> None:
        while self._waiting:
            count, entering = self._waiting[0]
            if self._inside and self._inside + count > self._limit():
                return
            self._waiting.popleft()
            if not entering.done():
                self._inside += count
                entering.set_result(None)


class Turns:
    """Lets large messages begin one after another, with as long for the others in between.

    To read a message of megabytes, or of thousands of parts, takes 0.1 s, in which nothing else
    happens on the loop. A worker is given many messages at once; if all were read in one turn of
    the loop, leases would not be renewed and nobody's answer would be sent for seconds.
    """

    def __init__(self) -> None:
        self._one = asyncio.Lock()
        #: Until then the loop belongs to others; time.monotonic().
        self._others_until = 0.0

    async def wait(self) -> None:
        """Wait until a large message may be read; what follows runs without a break."""
        async with self._one:
            await asyncio.sleep(max(0.0, self._others_until - time.monotonic()))
            # Runs in the loop's next turn, before another message's: its lock is released later.
            asyncio.get_running_loop().call_soon(self._has_run, time.monotonic())

    def _has_run(self, began: float) -> None:
        now = time.monotonic()
        self._others_until = now + (now - began)
