"""Limits how many requests a worker takes, and orders those that enter the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count

from worker.engine import Capacity, multi_sequence_slots
from worker.settings import WorkerSettings

#: Bytes of the largest message that is read without waiting, in less than a millisecond.
LARGE_BYTES = 16_384
#: Most places that are reserved for online requests: so many may come within a step of the engine.
RESERVED = 8


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Most requests that run in the engine (`slots`), and that are in flight (`limit`).

    The loop asks Redis for more once `low_water` places below `limit` are free (refill.py).
    Where online requests are expected, batches leave `reserved` places free for them, or more.
    `one_step`: all slots become free in one step. `context` is the model's context length in
    tokens, 0 if it is unknown.
    """

    slots: int = 0
    limit: int = 0
    low_water: int = 1
    reserved: int = 0
    one_step: bool = False
    context: int = 0

    @classmethod
    def of(cls, capacity: Capacity, settings: WorkerSettings) -> AdmissionLimits:
        """Return the limits for an engine under these settings."""
        slots, look_ahead = capacity.max_num_seqs, settings.look_ahead
        if look_ahead is None:
            # In an engine whose slots all become free in one step, the requests of the next step
            # must already wait while more are fetched. With a look-ahead of a quarter of the slots
            # every other step would be only a quarter full.
            look_ahead = max(8, 2 * slots if capacity.one_step else slots // 4)
        limit = slots + look_ahead
        # One POP refills half the look-ahead: few POPs are needed, and no slot stays empty.
        low_water = max(1, min(look_ahead // 2, limit))
        reserved = min(RESERVED, look_ahead // 4)
        return cls(slots, limit, low_water, reserved, capacity.one_step, capacity.max_model_len)

    @property
    def multi_sequence_slots(self) -> int:
        """Slots that requests of several sequences may take; the rest is for single ones."""
        return multi_sequence_slots(self.slots)

    @property
    def preparing_each(self) -> int:
        """Most requests of one tenant that are prepared at a time: the size of the look-ahead."""
        return max(1, self.limit - self.slots)

    @property
    def multi_sequence_waiting(self) -> int:
        """Requests of several sequences that may wait: a quarter of the look-ahead."""
        return max(1, (self.limit - self.slots) // 4)


class SequenceLimit:
    """Limits how many sequences the requests with several sequences have in the engine.

    These requests enter by priority, within a priority in order of arrival, while the sum of their
    sequences is at most `limit`. A request with more sequences than the limit enters when no other
    of them is inside. `admitted` is called when a request that waited has entered.
    """

    def __init__(
        self, limit: Callable[[], int], admitted: Callable[[], None] = lambda: None
    ) -> None:
        self._limit, self._admitted = limit, admitted
        self._inside = 0
        self._arrivals = count()
        #: A heap of waiting requests: priority, number of the arrival, sequences, future.
        self._waiting: list[tuple[int, int, int, asyncio.Future[None]]] = []

    @property
    def waiting(self) -> int:
        """The number of requests that wait."""
        return len(self._waiting)

    @asynccontextmanager
    async def entered(self, sequences: int, priority: int = 0) -> AsyncIterator[None]:
        """Wait until these sequences fit, and count them while in the context."""
        if sequences <= 1:
            yield
            return
        await self._enter(sequences, priority)
        try:
            yield
        finally:
            self._inside -= sequences
            self._admit()

    async def _enter(self, sequences: int, priority: int) -> None:
        entering: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = (priority, next(self._arrivals), sequences, entering)
        heappush(self._waiting, waiting)
        self._admit()
        if entering.done():
            return
        try:
            await entering
            self._admitted()
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
                heapify(self._waiting)
            elif entering.done() and not entering.cancelled():  # admitted just now
                self._inside -= sequences
            self._admit()
            raise

    def _admit(self) -> None:
        while self._waiting:
            _, _, sequences, entering = self._waiting[0]
            if self._inside and self._inside + sequences > self._limit():
                return
            heappop(self._waiting)
            if not entering.done():
                self._inside += sequences
                entering.set_result(None)


class LargeMessages:
    """Spaces out the reading of large messages, so that the loop is free half of the time.

    Reading a message of megabytes blocks the event loop for about 0.1 s. Many in a row would delay
    the renewal of leases, and answers.
    """

    def __init__(self) -> None:
        self._one_at_a_time = asyncio.Lock()
        self._not_before = 0.0  # time.monotonic()

    async def wait(self) -> None:
        """Wait until a large message may be read; the caller then reads it without awaiting."""
        async with self._one_at_a_time:
            await asyncio.sleep(max(0.0, self._not_before - time.monotonic()))
            # _note_read() runs in the loop's next iteration, when the caller has read its message.
            # No other message is read before, because the lock is still held.
            asyncio.get_running_loop().call_soon(self._note_read, time.monotonic())

    def _note_read(self, began: float) -> None:
        now = time.monotonic()
        self._not_before = now + (now - began)
