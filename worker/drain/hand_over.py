"""The end of a drain: what runs is finished, or handed back; nothing stays leased."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from contract.errors import StoreUnavailable
from worker.drain import stopping
from worker.drain.in_flight import Running
from worker.drain.scripts import ERRORS
from worker.drain.stopping import Stopping, end_tasks

if TYPE_CHECKING:
    from worker.drain.loop import Drain

log = logging.getLogger(__name__)


async def hand_over(drain: Drain, stop: Stopping) -> None:
    """Leave nothing behind: finish until the drain timeout is over, then hand back.

    Raises:
        StoreUnavailable: Redis does not answer, and something is left.
    """
    await stop.until_hurried(_finish(drain))
    leaving = asyncio.create_task(_leave(drain))
    # A little longer than its writes are tried, for they say what is wrong with Redis.
    await asyncio.wait([leaving], timeout=stopping.HURRY_S + stopping.CANCEL_S)
    if leaving.done():
        leaving.result()
        return
    await end_tasks([leaving], stopping.CANCEL_S)
    if drain.in_flight:
        raise StoreUnavailable(
            f"Redis is away while stopping (no answer for {stopping.HURRY_S:g} s); what is leased "
            "returns to the queue when its lease ends"
        )


async def _finish(drain: Drain) -> None:
    """Let what is in the engine come to its end."""
    await _give_up(drain, list(drain.in_flight)[drain.slots :])
    if tasks := drain.in_flight.tasks():
        await asyncio.wait(tasks)
    await drain.hand_back_crashed()
    await drain.flush()


async def _leave(drain: Drain) -> None:
    """Hand the rest back, also what a POP has leased whose reply was lost; say goodbye."""
    await _give_up(drain, list(drain.in_flight))
    await drain.flush()
    try:
        await drain.leases.renew(drain.in_flight.leases())
        if drain.holds_suspects_lock:
            await drain.leases.drop_suspects_lock()
        await drain.leases.leave()
    except ERRORS as error:
        log.debug("could not say goodbye: %s", error)


async def _give_up(drain: Drain, which: Sequence[Running]) -> None:
    """Abort what still runs and hand it back, not counted as a death."""
    drain.in_flight.abort(which, "released")
    if tasks := [r.task for r in which if r.task]:
        _, deaf = await asyncio.wait(tasks, timeout=stopping.ABORT_S)
        if deaf:
            log.warning(
                "%d requests have not ended %g s after they were aborted", len(deaf),
                stopping.ABORT_S, extra={"action": "abort_hangs"},
            )  # fmt: skip
    await drain.hand_back([r for r in which if not r.ended], frozenset())
