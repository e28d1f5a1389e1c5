"""Wakes the drain's loop: for what happened here, and for messages in lists that it found empty."""

import asyncio

from worker.drain.leases import Leases
from worker.drain.scripts import ERRORS

REDIS_PAUSE_S = 0.25


class Wakeup:
    """What the loop waits for when it has nothing to do."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self._changed = asyncio.Event()
        #: Set while the loop waits for a message.
        self.queue_empty = asyncio.Event()

    def poke(self) -> None:
        """Let the loop look again, whatever the reason."""
        self._changed.set()

    def clear(self) -> None:
        """Begin a look: only pokes from now on count."""
        self._changed.clear()

    async def wait(self, *, queue_empty: bool = False) -> None:
        """Wait for a poke since `clear`; with an empty queue also for a message."""
        if queue_empty:
            self.queue_empty.set()
        await self._changed.wait()

    async def run(self) -> None:
        """Wait for messages until cancelled, on one connection; it must run beside."""
        while True:
            await self.queue_empty.wait()
            try:
                if await self._leases.wait_for_message():
                    self.queue_empty.clear()
                    self._changed.set()
            except ERRORS:
                await asyncio.sleep(REDIS_PAUSE_S)
