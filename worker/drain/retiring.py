"""Gives finished batches their expiry and completes deletes that were interrupted."""

from contract.index import IndexChunk
from worker.drain.scripts import Scripts

#: Batches and results handled between two sweeps; with thousands of small batches one at a
#: time would take hours.
BATCHES = 100
RESULTS = 10_000


async def retire_some(scripts: Scripts) -> int:
    """Do so for the batches that wait for it; return how many results were handled.

    Raises:
        StoreUnavailable: Redis went away; what is left is done the next time.
    """
    count = 0
    for batch_id in await scripts.batches_to_end(BATCHES):
        count += await _retire(scripts, batch_id)
        if count >= RESULTS:
            break
    return count


async def _retire(scripts: Scripts, batch_id: str) -> int:
    """Give one batch's keys their expiry.

    The index goes after the results, so that an interruption repeats work
    instead of losing the way to a result.
    """
    ttl, life = scripts.settings.result_ttl_ms, await scripts.life_of(batch_id)
    count = start = 0
    while raws := await scripts.index_chunks(batch_id, start, 2):
        ids = [rid for raw in raws for rid in IndexChunk.load(raw).request_ids(batch_id)]
        answer = await scripts.run("retire", batch_id, life, ttl, 0, *ids)
        if answer < 1:
            return count + (await _delete(scripts, batch_id) if answer < 0 else 0)
        count += len(ids)
        start += len(raws)
    if await scripts.run("retire", batch_id, life, ttl, 1) < 0:
        count += await _delete(scripts, batch_id)
    return count


async def _delete(scripts: Scripts, batch_id: str) -> int:
    """Go on with a delete that was begun; return how many results were removed."""
    count, more = 0, 1
    while more and count < RESULTS:
        chunks = await scripts.index_chunks(batch_id, 0, 1)
        ids = [rid for raw in chunks for rid in IndexChunk.load(raw).request_ids(batch_id)]
        more = await scripts.run("delete_chunk", batch_id, *(chunks or [b""]), *ids)
        count += len(ids)
    return count
