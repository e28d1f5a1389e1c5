"""Commits endings in groups, so that one DONE and one step of the loop serve many."""

import asyncio
from collections.abc import Callable, Sequence

from worker.drain.endings import Ending
from worker.drain.leases import Leases

#: Seconds an ending waits for more to share its DONE. At 1,200 requests/s that is a tenth of a
#: round trip a request; it costs a result 4 ms in the middle (docs/decisions/0009).
LINGER_S = 0.008
#: This many endings of one engine step do not wait for more.
STEP_GROUP = 8
#: Most endings of one DONE: while Redis writes them the next are computed (docs/decisions/0009).
GROUP = 64
#: Bytes after which a group is closed; Redis serves nobody else while it writes them.
GROUP_BYTES = 4 * 2**20


class Committer:
    """Collects endings and commits them; calls `committed` with each group that is in Redis."""

    def __init__(
        self,
        leases: Leases,
        committed: Callable[[Sequence[Ending]], None],
        enough: Callable[[], int] = lambda: GROUP,
    ) -> None:
        """Prepare; once `enough` endings wait, or slots would stay empty, they are committed."""
        self._leases = leases
        self._committed = committed
        self._enough = enough
        self._waiting: list[Ending] = []
        self._due = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def put(self, ending: Ending) -> None:
        """Add an ending; an online request's is committed without waiting for more."""
        self._waiting.append(ending)
        self._idle.clear()
        online = ending.delivery.keep_ms is not None
        if online or len(self._waiting) >= min(GROUP, self._enough()):
            self._due.set()
        elif len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._linger)

    def _linger(self) -> None:
        """Commit what ended in the same step if it is a group; else wait for more."""
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
        if self._waiting:  # they have lingered already
            self._due.set()
        return group

    async def flush(self) -> None:
        """Wait until everything put so far is in Redis."""
        await self._idle.wait()
