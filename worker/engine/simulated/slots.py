"""Gives the simulated engine's slots to waiting requests by priority, as vLLM's scheduler does."""

import asyncio
from heapq import heappop, heappush
from itertools import count


class Slots:
    """The slots; the lowest priority number gets one first, then the first that came."""

    def __init__(self, free: int) -> None:
        self._free = free
        self._arrivals = count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    async def take(self, priority: int) -> None:
        """Wait for a slot; `give` releases it."""
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heappush(self._waiting, (priority, next(self._arrivals), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it had just got the slot
                self.give()
            raise

    def give(self) -> None:
        """Give a slot to the next waiting request."""
        while self._waiting:
            _, _, turn = heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
