"""Commits endings in groups, so that one DONE script writes many."""

import asyncio
from collections.abc import Callable, Sequence

from worker.drain.endings import Ending
from worker.drain.leases import Leases

#: Seconds that an ending waits for more, so that one DONE writes them all. At 1,200 requests/s ten
#: requests then share a round trip, and the median result is 4 ms later (docs/decisions/0009).
LINGER_S = 0.008
#: Fewest endings of one engine step that are committed without waiting for more.
STEP_GROUP = 8
#: Most endings of one DONE. The engine goes on while Redis writes them (docs/decisions/0009).
GROUP = 64
#: Bytes of results after which a group is complete, because Redis serves no other client while it
#: writes a group.
GROUP_BYTES = 4 * 2**20


class Committer:
    """Collects and commits endings; calls `committed` with each group once it is in Redis."""

    def __init__(
        self,
        leases: Leases,
        committed: Callable[[Sequence[Ending]], None],
        enough: Callable[[], int] = lambda: GROUP,
    ) -> None:
        """Prepare; endings are committed at the latest when `enough()` of them wait."""
        self._leases = leases
        self._committed = committed
        self._enough = enough
        self._waiting: list[Ending] = []
        self._due = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def put(self, ending: Ending) -> None:
        """Add an ending; the ending of an online request does not wait for more."""
        self._waiting.append(ending)
        self._idle.clear()
        if self._due.is_set():  # the next group has it
            return
        online = ending.delivery.keep_ms is not None
        if online or len(self._waiting) >= min(GROUP, self._enough()):
            self._due.set()
        elif len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._linger)

    def _linger(self) -> None:
        """Commit the endings of one step now if they are STEP_GROUP or more, else later."""
        if len(self._waiting) >= STEP_GROUP:
            self._due.set()
        elif self._waiting:
            asyncio.get_running_loop().call_later(LINGER_S, self._due.set)

    async def run(self) -> None:
        """Commit until cancelled."""
        while True:
            await self._due.wait()
            self._due.clear()
            if group := self._take():
                await self._leases.done(group)
                self._committed(group)
            if not self._waiting:
                self._idle.set()

    def _take(self) -> list[Ending]:
        count = size = 0
        for ending in self._waiting[:GROUP]:
            if size >= GROUP_BYTES:
                break
            count += 1
            size += len(ending.meta)
        group, self._waiting = self._waiting[:count], self._waiting[count:]
        if self._waiting:  # the rest has waited long enough
            self._due.set()
        return group

    async def flush(self) -> None:
        """Wait until all endings put so far are in Redis."""
        await self._idle.wait()
