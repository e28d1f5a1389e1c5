"""Runs the drain's loop: it leases requests from the queue and keeps all slots of the engine full.

    refill:  below the limit? -> POP -> one asyncio task per request
    serve:   check -> engine.generate -> ending
    commit:  endings in groups -> DONE -> free slots

A few more requests than slots, the look-ahead, wait in the engine's scheduler, so that a free slot
is filled immediately. At the end requests are finished or handed back; none stays leased.
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
from worker.drain.in_flight import Running, perhaps_inside
from worker.drain.lifecycle import end_tasks
from worker.drain.scripts import ERRORS
from worker.drain.wakeup import REDIS_PAUSE_S

log = logging.getLogger(__name__)

#: Bytes of messages in flight from which a worker takes no more: 25 of the longest lines.
MAX_IN_FLIGHT_BYTES = 256 * 2**20


async def run_drain(drain: Drain, side_tasks: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Start the engine, run requests until stopped, and hand the rest back.

    An error of a side task ends the drain, too.
    """
    async with asyncio.TaskGroup() as group:
        side = [
            drain.commit(group),
            *(group.create_task(c) for c in (drain.wakeup.run(), *side_tasks)),
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
            finally:  # Redis may be unreachable, or a side task may have failed
                try:
                    await drain.supervisor.stop()
                finally:
                    await end_tasks(side)
    drain.events.publish(Stopped())


async def _refill(drain: Drain) -> None:
    max_bytes = drain.supervisor.peers.of(MAX_IN_FLIGHT_BYTES)
    while not drain.lifecycle.stopping:
        drain.wakeup.clear()
        await drain.recover()
        await drain.hand_back_returned()
        if drain.paused:
            await drain.settle()
            drain.idle.set()
            await drain.wakeup.wait()
            continue
        free = drain.limits.limit - len(drain.in_flight) + len(drain.preparing)
        free_bytes = max_bytes - drain.in_flight.size
        count, pause_s = drain.refill.next_pop(free, drain.limits)
        if free_bytes <= 0 or pause_s > 0:
            await drain.wakeup.wait(pause_s or math.inf)
            continue
        popped = await drain.pop(count, max_bytes=free_bytes)
        if popped is None:
            continue
        drain.admit(popped)
        if popped.suspects and await _run_suspects(drain):
            continue
        if not popped.deliveries and not popped.more:
            await drain.wakeup.wait(queue_empty=True)


# -- suspects: requests whose engine died before -----------------------------------------------
#
# Suspects run apart from the queue, in groups, on one worker at a time. RELEASE and SWEEP keep the
# size of the next group in Redis. If the engine dies with a group, the next group has half its
# size. Requests that complete are no longer suspects. A request that runs alone and kills the
# engine twice becomes a dead letter. So one poison among n suspects costs at most log2(n) + 1
# further deaths, rounded up.


async def _run_suspects(drain: Drain) -> bool:
    """Run one group of suspects; return False if another worker has the lock for suspects.

    The queue's other requests run before the next group, since each group may cost a start of the
    engine. A worker that stops keeps the lock until it has handed its requests back, because
    suspects may still run in its engine. If Redis does not answer, the lock expires.
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
    await drain.recover()  # the queue's other requests may have killed the engine just now
    popped = await drain.pop(0)  # to read the number of suspects, which may have changed
    if not popped or not popped.suspects or drain.lifecycle.stopping:
        return
    group = popped.group or math.ceil(popped.suspects / 2)
    suspects = keys.suspects_list(drain.leases.queue)
    taken = await drain.pop(min(group, drain.limits.slots), [suspects])
    if taken and taken.deliveries:
        drain.admit(taken)
        await drain.settle()
        await drain.recover()


# -- the end ------------------------------------------------------------------------------------


async def _hand_over(drain: Drain) -> None:
    """Let requests finish until the stop is hurried (lifecycle.py), then hand the rest back.

    Raises:
        StoreUnavailable: Redis does not answer, and requests are still leased.
    """
    await drain.lifecycle.until_hurried(_finish(drain))
    leaving = asyncio.create_task(_leave(drain))
    # A little longer than writes are retried (HURRY_S), because their error names the reason.
    await asyncio.wait([leaving], timeout=lifecycle.HURRY_S + lifecycle.CANCEL_S)
    if leaving.done():
        leaving.result()
        return
    await end_tasks([leaving], lifecycle.CANCEL_S)
    if drain.in_flight:
        raise StoreUnavailable(
            f"Redis is unreachable while stopping (no answer for {lifecycle.HURRY_S:g} s); leased "
            "requests return to the queue when their leases end"
        )


async def _finish(drain: Drain) -> None:
    """Hand the look-ahead back, and wait for the requests in the engine's slots."""
    in_flight = [r for r in drain.in_flight if not r.ended]
    inside = {r.delivery.lease for r in perhaps_inside(in_flight, drain.limits.slots)}
    await _abort_and_hand_back(drain, [r for r in in_flight if r.delivery.lease not in inside])
    if tasks := drain.in_flight.tasks():
        await asyncio.wait(tasks)
    await drain.hand_back_crashed()
    await drain.flush()
    await drain.supervisor.peers.stop_peers()


async def _leave(drain: Drain) -> None:
    """Hand back all leases, also those whose POP reply was lost, and remove the announcement."""
    await _abort_and_hand_back(drain, list(drain.in_flight))
    await drain.flush()
    try:
        await drain.leases.renew(drain.in_flight.leases())
        await drain.leases.drop_suspects_lock()
        # Waiting producers can read a failed worker's reason for some seconds. A worker that swaps
        # announces itself again soon.
        if drain.supervisor.failed or drain.lifecycle.swapping:
            await drain.leases.sweep(announcement(drain))
        else:
            await drain.leases.leave()
    except ERRORS as error:
        log.debug("could not remove this worker's announcement: %s", error)


async def _abort_and_hand_back(drain: Drain, which: Sequence[Running]) -> None:
    """Abort these requests if they still run, and hand back the unended ones without a death."""
    drain.in_flight.abort(which, "released")
    if tasks := [r.task for r in which if r.task]:
        _, hanging = await asyncio.wait(tasks, timeout=lifecycle.ABORT_S)
        if hanging:
            text = "%d requests have not ended %g s after they were aborted"
            log.warning(text, len(hanging), lifecycle.ABORT_S, extra={"action": "abort_hangs"})
    await drain.hand_back([r for r in which if not r.ended], frozenset())
