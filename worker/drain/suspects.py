"""Runs requests whose engine died before: apart from the queue, in halves.

One worker at a time does so. The groups' sizes live in Redis, where RELEASE and
SWEEP halve them: a group that dies is halved, a half that survives is cleared,
a single request that dies twice is the culprit and becomes a dead letter. So one
poison among n suspects costs at most log2(n) + 2 further deaths.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from contract.redis import keys
from worker.drain.scripts import ERRORS

if TYPE_CHECKING:
    from worker.drain.leases import Popped
    from worker.drain.loop import Drain


async def run_suspects(drain: Drain, first: Popped) -> bool:
    """Run suspects until none is left; False if another worker does.

    A worker that is told to stop keeps the lock until it has handed over: suspects may still run
    in its engine.

    Raises:
        redis.RedisError, OSError: Redis went away; the lock ends by itself.
    """
    if not await drain.leases.take_suspects_lock():
        return False
    suspects = [keys.suspects_list(drain.leases.queue)]
    drain.holds_suspects_lock = True  # upkeep prolongs it together with the leases
    try:
        await _run_groups(drain, suspects, first)
        if not drain.stopping:
            drain.holds_suspects_lock = False
            await drain.leases.drop_suspects_lock()
    except ERRORS:
        drain.holds_suspects_lock = False
        raise
    return True


async def _run_groups(drain: Drain, suspects: list[str], first: Popped) -> None:
    await drain.settle()
    await drain.recover()  # the queue's own requests may have killed the engine just now
    found: Popped | None = first
    while found and found.suspects and not drain.stopping:
        group = found.group or math.ceil(found.suspects / 2)
        found = await drain.pop(min(group, drain.slots), suspects)
        if found and found.deliveries:
            drain.admit(found)
            await drain.settle()
            await drain.recover()
            found = await drain.pop(0)
