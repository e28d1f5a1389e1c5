"""One at a time, tenants by turns: who has many waiting delays others by one at a time."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """Lets one in at a time. For one event loop."""

    def __init__(self) -> None:
        self._taken = False
        #: Who waits, by tenant: the first of them has waited longest for a turn.
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def taken(self, tenant: str) -> AsyncIterator[None]:
        """Hold the turn; waits for it as long as others have it."""
        if self._taken:
            await self._wait(tenant)
        self._taken = True
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, tenant: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it has got the turn just now
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            tenant, line = self._waiting.popitem(last=False)
            turn = line.popleft()
            if line:
                self._waiting[tenant] = line  # as the last
            if not turn.done():
                turn.set_result(None)
                return
        self._taken = False
