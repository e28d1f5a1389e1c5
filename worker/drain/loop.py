"""The drain's loop: leases requests from the queue and keeps every slot of the engine full.

    refill:  free room? -> POP -> one asyncio task per request
    serve:   check -> engine.generate -> ending
    commit:  endings in groups -> DONE -> room

Slots are refilled one by one; a small look-ahead above them waits inside the
engine's own scheduler. Nothing is popped before the engine is ready.

At the end what runs is finished, or handed back; nothing stays leased.
"""

import asyncio
import logging
import math
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

from contract.errors import StoreUnavailable
from contract.redis import keys
from worker.drain import lifecycle
from worker.drain.announcement import announcement
from worker.drain.drain import Drain
from worker.drain.events import Stopped
from worker.drain.in_flight import Running
from worker.drain.lifecycle import end_tasks
from worker.drain.scripts import ERRORS
from worker.drain.wakeup import REDIS_PAUSE_S

log = logging.getLogger(__name__)

#: Bytes of messages that a worker holds before it takes no more: 25 of the longest lines.
MAX_IN_FLIGHT_BYTES = 256 * 2**20


async def run_drain(drain: Drain, beside: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Start the engine, drain until stopped, hand back what is left.

    `beside` runs meanwhile (worker/drain/side_tasks.py); if any of it dies, so does the drain.
    """
    async with asyncio.TaskGroup() as group:
        side = [
            drain.commit(group),
            *(group.create_task(c) for c in (drain.wakeup.run(), *beside)),
        ]
        try:
            if await drain.lifecycle.until_asked(drain.supervisor.start()):
                drain.set_limits()
                await drain.lifecycle.until_hurried(_refill(drain))
        finally:
            drain.begin_stop()
            try:
                await _hand_over(drain)
                drain.events.publish(drain.drained())
            finally:  # Redis may be away, or a side task may have died meanwhile
                try:
                    await drain.supervisor.stop()
                finally:
                    await end_tasks(side)
    drain.events.publish(Stopped())


async def _refill(drain: Drain) -> None:
    most_bytes = drain.supervisor.peers.of(MAX_IN_FLIGHT_BYTES)
    while not drain.lifecycle.stopping:
        drain.wakeup.clear()
        await drain.recover()
        if drain.paused:
            await drain.settle()
            drain.idle.set()
            await drain.wakeup.wait()
            continue
        free = drain.limits.limit - len(drain.in_flight) + len(drain.preparing)
        free_bytes = most_bytes - drain.in_flight.size
        if free < drain.limits.low_water or free_bytes <= 0:
            await drain.wakeup.wait()
            continue
        popped = await drain.pop(free, max_bytes=free_bytes)
        if popped is None:
            continue
        drain.admit(popped)
        if popped.suspects and await _ran_suspects(drain):
            continue
        if not popped.deliveries and not popped.more:
            await drain.wakeup.wait(queue_empty=True)


# -- suspects: requests whose engine died before -----------------------------------------------
#
# They run apart from the queue, in halves, and one worker at a time does so. The groups' sizes live
# in Redis, where RELEASE and SWEEP halve them: a group that dies is halved, a half that survives is
# cleared, a single request that dies twice is the culprit and becomes a dead letter. So one poison
# among n suspects costs at most log2(n) + 2 further deaths.


async def _ran_suspects(drain: Drain) -> bool:
    """Run one group of suspects; False if another worker does.

    The queue has its turn before the next group: each may cost a start of the engine.

    A worker that is told to stop keeps the lock until it has handed over: suspects may still
    run in its engine. If Redis goes away the lock ends by itself.
    """
    leases = drain.leases
    try:
        if not await leases.take_suspects_lock():
            return False
        try:
            await drain.lifecycle.until_asked(drain.supervisor.peers.pause())
            await _run_group(drain)
            if not drain.lifecycle.stopping:
                await leases.drop_suspects_lock()
        except ERRORS:
            leases.holds_suspects_lock = False
            raise
        finally:
            drain.supervisor.peers.resume()
    except ERRORS as error:
        drain.outage.lost(error)
        await asyncio.sleep(REDIS_PAUSE_S)
    return True


async def _run_group(drain: Drain) -> None:
    await drain.settle()
    await drain.recover()  # the queue's own requests may have killed the engine just now
    popped = await drain.pop(0)  # the first POP may be long ago
    if not popped or not popped.suspects or drain.lifecycle.stopping:
        return
    group = popped.group or math.ceil(popped.suspects / 2)
    suspects = keys.suspects_list(drain.leases.queue)
    found = await drain.pop(min(group, drain.limits.slots), [suspects])
    if found and found.deliveries:
        drain.admit(found)
        await drain.settle()
        await drain.recover()


# -- the end ------------------------------------------------------------------------------------


async def _hand_over(drain: Drain) -> None:
    """Leave nothing behind: finish until the drain timeout is over, then hand back.

    Raises:
        StoreUnavailable: Redis does not answer, and something is left.
    """
    await drain.lifecycle.until_hurried(_finish(drain))
    leaving = asyncio.create_task(_leave(drain))
    # A little longer than its writes are tried, for they say what is wrong with Redis.
    await asyncio.wait([leaving], timeout=lifecycle.HURRY_S + lifecycle.CANCEL_S)
    if leaving.done():
        leaving.result()
        return
    await end_tasks([leaving], lifecycle.CANCEL_S)
    if drain.in_flight:
        raise StoreUnavailable(
            f"Redis is away while stopping (no answer for {lifecycle.HURRY_S:g} s); what is leased "
            "returns to the queue when its lease ends"
        )


async def _finish(drain: Drain) -> None:
    """Let what is in the engine come to its end."""
    await _give_up(drain, list(drain.in_flight)[drain.limits.slots :])
    if tasks := drain.in_flight.tasks():
        await asyncio.wait(tasks)
    await drain.hand_back_crashed()
    await drain.flush()
    await drain.supervisor.peers.ended()


async def _leave(drain: Drain) -> None:
    """Hand the rest back, also what a POP has leased whose reply was lost; say goodbye."""
    await _give_up(drain, list(drain.in_flight))
    await drain.flush()
    try:
        await drain.leases.renew(drain.in_flight.leases())
        await drain.leases.drop_suspects_lock()
        if drain.supervisor.failed:  # its reason stays for a while, for those who wait
            await drain.leases.sweep(announcement(drain))
        else:
            await drain.leases.leave()
    except ERRORS as error:
        log.debug("could not say goodbye: %s", error)


async def _give_up(drain: Drain, which: Sequence[Running]) -> None:
    """Abort what still runs and hand it back, not counted as a death."""
    drain.in_flight.abort(which, "released")
    if tasks := [r.task for r in which if r.task]:
        _, deaf = await asyncio.wait(tasks, timeout=lifecycle.ABORT_S)
        if deaf:
            log.warning(
                "%d requests have not ended %g s after they were aborted",
                len(deaf),
                lifecycle.ABORT_S,
                extra={"action": "abort_hangs"},
            )
    await drain.hand_back([r for r in which if not r.ended], frozenset())
