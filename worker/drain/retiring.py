"""The end of batches: finished ones get their expiry, deletes that were cut short are ended."""

from __future__ import annotations

from contract.index import IndexChunk
from contract.redis import keys
from worker.drain.scripts import Scripts

#: Batches and results handled between two sweeps; with thousands of small batches one at a
#: time would take hours.
BATCHES = 100
RESULTS = 10_000


async def retire_some(scripts: Scripts) -> int:
    """Handle the batches that wait for their end; returns results handled.

    Raises:
        redis.RedisError, OSError: Redis went away; what is left is done the next time.
    """
    count = 0
    for raw in await scripts.redis.zrange(keys.RETIRING, 0, BATCHES - 1):
        count += await _retire(scripts, raw.decode())
        if count >= RESULTS:
            break
    return count


async def _retire(scripts: Scripts, batch_id: str) -> int:
    """Give one batch's keys their expiry.

    The index goes after the results, so that an interruption repeats work
    instead of losing the way to a result.
    """
    ttl, index = scripts.settings.result_ttl_ms, keys.batch_key(batch_id, "index")
    life = await scripts.redis.hget(keys.batch_key(batch_id), "life") or b""
    count = start = 0
    while raws := await scripts.redis.lrange(index, start, start + 1):
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
    """Go on with a delete that somebody has begun; returns results removed."""
    count, more = 0, 1
    while more and count < RESULTS:
        raw = await scripts.redis.lindex(keys.batch_key(batch_id, "index"), 0) or b""
        ids = IndexChunk.load(raw).request_ids(batch_id) if raw else []
        more = await scripts.run("delete_chunk", batch_id, raw, *ids)
        count += len(ids)
    return count
