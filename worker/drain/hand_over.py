"""The end of a drain: what runs is finished, or handed back; nothing stays leased."""

import asyncio
import logging
from collections.abc import Sequence

from contract.errors import StoreUnavailable
from worker.drain import stopping
from worker.drain.announcement import announcement
from worker.drain.in_flight import Running
from worker.drain.scripts import ERRORS
from worker.drain.serving import Serving
from worker.drain.stopping import end_tasks
from worker.drain.suspects import Suspects

log = logging.getLogger(__name__)


async def hand_over(serving: Serving, suspects: Suspects) -> None:
    """Leave nothing behind: finish until the drain timeout is over, then hand back.

    Raises:
        StoreUnavailable: Redis does not answer, and something is left.
    """
    await serving.lifecycle.until_hurried(_finish(serving))
    leaving = asyncio.create_task(_leave(serving, suspects))
    # A little longer than its writes are tried, for they say what is wrong with Redis.
    await asyncio.wait([leaving], timeout=stopping.HURRY_S + stopping.CANCEL_S)
    if leaving.done():
        leaving.result()
        return
    await end_tasks([leaving], stopping.CANCEL_S)
    if serving.in_flight:
        raise StoreUnavailable(
            f"Redis is away while stopping (no answer for {stopping.HURRY_S:g} s); what is leased "
            "returns to the queue when its lease ends"
        )


async def _finish(serving: Serving) -> None:
    """Let what is in the engine come to its end."""
    await _give_up(serving, list(serving.in_flight)[serving.room.slots :])
    if tasks := serving.in_flight.tasks():
        await asyncio.wait(tasks)
    await serving.hand_back_crashed()
    await serving.flush()
    await serving.others.ended()


async def _leave(serving: Serving, suspects: Suspects) -> None:
    """Hand the rest back, also what a POP has leased whose reply was lost; say goodbye."""
    await _give_up(serving, list(serving.in_flight))
    await serving.flush()
    try:
        await serving.leases.renew(serving.in_flight.leases())
        await suspects.drop_lock()
        if serving.supervisor.failed:  # its reason stays for a while, for those who wait
            await serving.leases.sweep(announcement(serving))
        else:
            await serving.leases.leave()
    except ERRORS as error:
        log.debug("could not say goodbye: %s", error)


async def _give_up(serving: Serving, which: Sequence[Running]) -> None:
    """Abort what still runs and hand it back, not counted as a death."""
    serving.in_flight.abort(which, "released")
    if tasks := [r.task for r in which if r.task]:
        _, deaf = await asyncio.wait(tasks, timeout=stopping.ABORT_S)
        if deaf:
            log.warning(
                "%d requests have not ended %g s after they were aborted",
                len(deaf),
                stopping.ABORT_S,
                extra={"action": "abort_hangs"},
            )
    await serving.hand_back([r for r in which if not r.ended], frozenset())
