"""Removes files that have expired, for as long as a gateway serves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from contract.errors import WarmqError
from producer.gateway.files.objects import Files
from producer.gateway.services import Services

log = logging.getLogger(__name__)

#: Between two looks, in seconds.
EVERY_S = 5.0


@contextlib.asynccontextmanager
async def sweeping(services: Services) -> AsyncIterator[None]:
    """Sweep in the background while the context is open."""
    task = asyncio.create_task(_sweep(Files(services)))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _sweep(files: Files) -> None:
    while True:
        try:
            await asyncio.to_thread(files.sweep)
        except WarmqError as error:  # Redis or the store is away: the next look does it
            log.warning("files are not swept: %s", error.message, extra={"action": "no_sweep"})
        await asyncio.sleep(EVERY_S)
