"""Sweeps expired leases, writes this worker's announcement, and retires finished batches.

To retire a batch is to set the time to live of its results.
"""

import asyncio
from contextlib import suppress

from contract.index import IndexChunk
from worker.drain.announcement import announcement
from worker.drain.drain import Drain
from worker.drain.events import EngineReady, Swept
from worker.drain.leases import SWEEP_LIMIT, Leases
from worker.drain.scripts import ERRORS

#: Most seconds between two sweeps.
SWEEP_S = 1.0
#: Most batches retired between two sweeps: enough to retire thousands of small ones in a minute.
BATCHES = 100
#: Number of results retired or deleted after which the next sweep is run first.
RESULTS = 10_000


async def sweep(drain: Drain) -> None:
    """Sweep until cancelled, and at once when the engine is ready, for which producers wait."""
    pause_s = min(SWEEP_S, drain.settings.lease_s / 8)
    due = asyncio.Event()
    drain.events.subscribe(EngineReady, lambda _: due.set())
    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await due.wait()
        due.clear()
        try:
            count = await drain.leases.sweep(announcement(drain))
            await retire_some(drain.leases)
        except ERRORS as error:
            drain.outage.lost(error)
            continue
        drain.outage.over()
        if count >= SWEEP_LIMIT:  # there may be more expired leases
            due.set()
        if count > 0:
            drain.events.publish(Swept(count))
        drain.wakeup.poke()


async def retire_some(leases: Leases) -> int:
    """Retire finished batches and continue deletes; return the number of their results."""
    count = 0
    for batch_id in await leases.batches_to_end(BATCHES):
        count += await _retire(leases, batch_id)
        if count >= RESULTS:
            break
    return count


async def _retire(leases: Leases, batch_id: str) -> int:
    """Set the time to live of one batch's keys, the index last; return the number of results.

    The index is last so that a repeated call finds all results.
    """
    ttl_ms, life = leases.settings.result_ttl_ms, await leases.life_of(batch_id)
    count = start = 0
    while chunks := await leases.index_chunks(batch_id, start, 2):
        ids = [each for raw in chunks for each in IndexChunk.load(raw).request_ids(batch_id)]
        answer = await leases.scripts.run("retire", batch_id, life, ttl_ms, 0, *ids)
        if answer < 1:  # -1: the batch is being deleted; 0: it must not be retired now
            return count + (await _delete(leases, batch_id) if answer < 0 else 0)
        count += len(ids)
        start += len(chunks)
    if await leases.scripts.run("retire", batch_id, life, ttl_ms, 1) < 0:
        count += await _delete(leases, batch_id)
    return count


async def _delete(leases: Leases, batch_id: str) -> int:
    """Continue an interrupted delete; return the number of results removed."""
    count, more = 0, 1
    while more and count < RESULTS:
        chunks = await leases.index_chunks(batch_id, 0, 1)
        ids = [each for raw in chunks for each in IndexChunk.load(raw).request_ids(batch_id)]
        more = await leases.scripts.run("delete_chunk", batch_id, *(chunks or [b""]), *ids)
        count += len(ids)
    return count
