"""Removes what has expired of files and uploads, for as long as a gateway serves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from functools import partial

from contract.errors import WarmqError
from contract.naming import DEFAULT_TENANT
from gateway.background import background
from gateway.batches.api.record import end_older_records
from gateway.files import uploads
from gateway.files.files import Files
from gateway.http.services import Services

log = logging.getLogger(__name__)

#: Between two looks, in seconds.
EVERY_S = 5.0
#: Between two looks for what writers that died have left in the store, and how old that must be.
#: No upload of a client pauses for so long: the connection would be closed.
STORE_EVERY_S, UNFINISHED_S = 600.0, 6 * 3600.0
#: Between two looks for counts of records that Redis has removed at their end, in seconds.
RECORDS_EVERY_S = 600.0


def sweep_files(services: Services) -> int:
    """Remove files that have expired, and parts of uploads that have ended; return how many."""
    return Files(services).sweep() + uploads.sweep(services)


def forget_records(services: Services) -> int:
    """Count no more what Redis has removed of tenants' records; return how many they were.

    Batches that ended before records had an end get theirs, too.
    """
    count = 0
    for owner in services.records.owners():
        count += services.records.forget_gone(owner)
    for owner in {key.tenant for key in services.keys.all()} | {DEFAULT_TENANT}:
        end_older_records(services, owner)
    return count


@contextlib.asynccontextmanager
async def sweeping(services: Services) -> AsyncIterator[None]:
    """Sweep in the background while the context is open."""
    async with background(partial(_sweep, services)):
        yield


async def _sweep(services: Services) -> None:
    store_at = records_at = 0.0
    while True:
        try:
            await asyncio.to_thread(sweep_files, services)
            if time.monotonic() >= store_at:
                store_at = time.monotonic() + STORE_EVERY_S
                await asyncio.to_thread(services.store.sweep, UNFINISHED_S, time.time())
            if time.monotonic() >= records_at:
                records_at = time.monotonic() + RECORDS_EVERY_S
                await asyncio.to_thread(forget_records, services)
        except WarmqError as error:  # Redis or the store is away: the next look does it
            log.warning("files are not swept: %s", error.message, extra={"action": "no_sweep"})
        except Exception:  # one bad record must not keep what expires for ever
            log.exception("files are not swept", extra={"action": "no_sweep"})
        await asyncio.sleep(EVERY_S)
