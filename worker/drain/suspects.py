"""Runs requests whose engine died before: apart from the queue, in halves.

One worker at a time does so. The groups' sizes live in Redis, where RELEASE and
SWEEP halve them: a group that dies is halved, a half that survives is cleared,
a single request that dies twice is the culprit and becomes a dead letter. So one
poison among n suspects costs at most log2(n) + 2 further deaths.
"""

import math

from contract.redis import keys
from worker.drain.scripts import ERRORS
from worker.drain.serving import Serving


class Suspects:
    """One worker's part in running the suspects of its queue; owns this worker's lock on them."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._list = keys.suspects_list(serving.leases.queue)
        self.holds_lock = False

    async def run(self) -> bool:
        """Run one group of suspects; False if another worker does.

        The queue has its turn before the next group: each may cost a start of the engine.

        A worker that is told to stop keeps the lock until it has handed over: suspects may still
        run in its engine.

        Raises:
            StoreUnavailable: Redis went away; the lock ends by itself.
        """
        if not await self._serving.leases.take_suspects_lock():
            return False
        self.holds_lock = True
        others = self._serving.others
        try:
            await self._serving.lifecycle.until_asked(others.pause())
            await self._run_group()
            if not self._serving.lifecycle.stopping:
                await self.drop_lock()
        except ERRORS:
            self.holds_lock = False
            raise
        finally:
            others.resume()
        return True

    async def _run_group(self) -> None:
        serving = self._serving
        await serving.settle()
        await serving.recover()  # the queue's own requests may have killed the engine just now
        popped = await serving.pop(0)  # the first POP may be long ago
        if not popped or not popped.suspects or serving.lifecycle.stopping:
            return
        group = popped.group or math.ceil(popped.suspects / 2)
        found = await serving.pop(min(group, serving.room.slots), [self._list])
        if found and found.deliveries:
            serving.admit(found)
            await serving.settle()
            await serving.recover()

    async def renew_lock(self) -> None:
        """Prolong the lock, if this worker holds it."""
        if self.holds_lock:
            await self._serving.leases.take_suspects_lock()

    async def drop_lock(self) -> None:
        """Let another worker run suspects, if this one held the lock."""
        if self.holds_lock:
            self.holds_lock = False
            await self._serving.leases.drop_suspects_lock()
