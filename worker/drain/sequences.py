"""Requests of many sequences share the engine's slots, so that they do not fill its queue."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


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
