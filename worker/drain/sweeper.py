"""Puts back what dead workers held, ends finished batches, and announces this worker."""

import asyncio
from contextlib import suppress

from worker.drain.announcement import announcement
from worker.drain.events import EngineReady, Swept
from worker.drain.leases import SWEEP_LIMIT
from worker.drain.loop import Drain
from worker.drain.retiring import retire_some
from worker.drain.scripts import ERRORS

SWEEP_S = 1.0


async def sweep(drain: Drain) -> None:
    """Sweep until cancelled; at once when the engine is ready, which others wait to hear."""
    pause_s = min(SWEEP_S, drain.settings.lease_s / 8)
    ready = asyncio.Event()
    drain.events.subscribe(EngineReady, lambda _: ready.set())
    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await ready.wait()
        ready.clear()
        try:
            count = await drain.leases.sweep(announcement(drain))
            await retire_some(drain.leases)
        except ERRORS as error:
            drain.outage.lost(error)
            continue
        drain.outage.over()
        if count >= SWEEP_LIMIT:  # there may be more
            ready.set()
        if count > 0:
            drain.events.publish(Swept(count))
        drain.wakeup.poke()
