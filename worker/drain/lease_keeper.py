"""Prolongs the leases of what is in flight, and aborts the work of those that are lost."""

import asyncio

from worker.drain.events import LeasesLost
from worker.drain.loop import Drain
from worker.drain.scripts import ERRORS


async def keep_leases(drain: Drain) -> None:
    """Renew until cancelled, also the suspects' lock."""
    lease_s = drain.settings.lease_s
    pause_s = lease_s / 3
    while True:
        await asyncio.sleep(pause_s)
        try:
            lost = await drain.leases.renew(drain.in_flight.leases())
            await drain.suspects.renew_lock()
        except ERRORS as error:
            drain.outage.lost(error)
            pause_s = min(1.0, lease_s / 12)  # another third would risk the leases
            continue
        drain.outage.over()
        pause_s = lease_s / 3
        held = (drain.in_flight.get(lease) for lease in lost)
        if gone := [r for r in held if r is not None and not r.ended]:
            drain.events.publish(LeasesLost([r.delivery for r in gone]))
            drain.in_flight.abort(gone, "lost")
