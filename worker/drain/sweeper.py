"""Puts back what dead workers held, ends finished batches, and announces this worker."""

import asyncio

import orjson

from worker.drain.events import Swept
from worker.drain.loop import Drain
from worker.drain.retiring import retire_some
from worker.drain.scripts import ERRORS

SWEEP_S = 1.0


async def sweep(drain: Drain) -> None:
    """Sweep until cancelled."""
    pause_s = min(SWEEP_S, drain.settings.lease_s / 8)
    while True:
        await asyncio.sleep(pause_s)
        try:
            count = await drain.leases.sweep(_announcement(drain))
            await retire_some(drain.leases)
        except ERRORS as error:
            drain.outage.lost(error)
            continue
        drain.outage.over()
        if count > 0:
            drain.events.publish(Swept(count))
        drain.wakeup.poke()


def _announcement(drain: Drain) -> bytes:
    return orjson.dumps({
        "state": drain.lifecycle.state.value,
        "queue": drain.leases.queue,
        "model": drain.settings.model,
        "in_flight": len(drain.in_flight),
        "limit": drain.room.limit,
    })  # fmt: skip
