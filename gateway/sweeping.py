"""Removes expired files, uploads and records, and looks after responses, while a gateway serves."""

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
from gateway.files.files import Files, remove_due
from gateway.http.services import Services
from gateway.online.responses import calls

log = logging.getLogger(__name__)

#: Seconds between two removals of expired files and uploads, of unfinished files in the store, and
#: of records from their tenants' counts.
EVERY_S, STORE_EVERY_S, RECORDS_EVERY_S = 5.0, 600.0, 600.0
#: Seconds after which an unfinished file in the store is removed: no upload pauses that long.
UNFINISHED_S = 6 * 3600.0


def remove_expired_files(services: Services) -> int:
    """Remove expired files, and parts of ended uploads; return their number."""
    return Files(services).remove_expired() + uploads.remove_expired(services)


def look_at_responses(services: Services) -> int:
    """Queue the requests of responses whose gateway died; return how many responses have ended."""
    return remove_due(services, "response", partial(calls.look, services))


def forget_records(services: Services) -> int:
    """Subtract removed records from their tenants' counts; return the number of those records.

    Records of batches that ended under an earlier release get the time at which they expire.
    """
    count = 0
    for owner in services.records.owners():
        count += services.records.forget_gone(owner)
    for owner in {key.tenant for key in services.keys.all()} | {DEFAULT_TENANT}:
        end_older_records(services, owner)
    return count


@contextlib.asynccontextmanager
async def removing_expired(services: Services) -> AsyncIterator[None]:
    async with background(partial(_remove_expired, services)):
        yield


async def _remove_expired(services: Services) -> None:
    store_at = records_at = 0.0
    while True:
        try:
            await asyncio.to_thread(look_at_responses, services)
            await asyncio.to_thread(remove_expired_files, services)
            if time.monotonic() >= store_at:
                store_at = time.monotonic() + STORE_EVERY_S
                await asyncio.to_thread(services.store.remove_unfinished, UNFINISHED_S, time.time())
            if time.monotonic() >= records_at:
                records_at = time.monotonic() + RECORDS_EVERY_S
                await asyncio.to_thread(forget_records, services)
        except WarmqError as error:  # Redis or the store is unreachable: tried again later
            log.warning(
                "expired files are not removed: %s", error.message, extra={"action": "no_sweep"}
            )
        except Exception:  # one bad record must not end all removals
            log.exception("expired files are not removed", extra={"action": "no_sweep"})
        await asyncio.sleep(EVERY_S)
