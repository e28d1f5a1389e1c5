"""Receives cancellations and listeners' subscriptions over Redis's pub/sub."""

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import orjson

from contract import naming
from contract.redis import keys
from worker.drain.drain import Drain
from worker.drain.in_flight import Running
from worker.drain.running_text import RunningText
from worker.drain.scripts import ERRORS

log = logging.getLogger(__name__)

#: Seconds from a lost pub/sub connection to the next try.
RECONNECT_S = 0.5
#: Seconds that a revocation is kept: three hours, as celery.worker.state.REVOKE_EXPIRES.
REVOKE_KEEP_S = 10800.0


class Cancels:
    """Aborts requests of this worker that are cancelled while they run."""

    def __init__(self, drain: Drain, text: RunningText) -> None:
        self._leases = drain.leases
        self._in_flight = drain.in_flight
        self._text = text
        self._timeout_s = drain.settings.redis_timeout_s

    async def run(self) -> None:
        """Receive until cancelled; after each connect look up what was cancelled without one."""
        while True:
            pubsub = self._leases.subscribe()
            try:
                await pubsub.subscribe(
                    keys.CANCEL_CHANNEL, keys.BATCH_CANCEL_CHANNEL, naming.LISTEN_CHANNEL
                )
                await self._catch_up()
                await self._receive(pubsub)
            except ERRORS as error:
                log.debug("cancel channel: %s", error)
                await asyncio.sleep(RECONNECT_S)
            finally:
                await pubsub.aclose()

    async def revoke(self, request_ids: list[str]) -> None:
        """Revoke requests (Celery's word): abort those that run here, let POP drop the rest."""
        await self._leases.revoke(request_ids, REVOKE_KEEP_S)
        self.abort(request_ids)

    def abort(self, request_ids: list[str]) -> None:
        """Abort those of the requests that run in this worker."""
        self._in_flight.abort(self._running(set(request_ids)), "cancelled")

    async def _receive(self, pubsub: Any) -> None:
        """Act on messages; raise ConnectionError if a PING is not answered."""
        pinged = False
        while True:
            message = await pubsub.get_message(timeout=self._timeout_s)
            if message is not None:
                pinged = False
                if message["type"] == "message":
                    await self._act_on(message["channel"].decode(), message["data"])
            elif pinged:
                raise ConnectionError("no answer to a PING")
            else:
                pinged = True
                await pubsub.ping()

    async def _act_on(self, channel: str, data: bytes) -> None:
        try:
            if channel == naming.LISTEN_CHANNEL:
                self._text.subscribe(orjson.loads(data))
            elif channel == keys.BATCH_CANCEL_CHANNEL:
                await self._cancel_batch(data.decode())
            else:
                self._in_flight.abort(self._running({*map(str, orjson.loads(data))}), "cancelled")
        # Anybody may publish any bytes, also deeply nested JSON: no worker may end because of them.
        except (ValueError, TypeError, KeyError, RecursionError):
            log.warning("ignored a message on %s", channel, extra={"action": "bad_message"})

    async def _cancel_batch(self, batch: str) -> None:
        if of_batch := [r for r in self._in_flight if r.delivery.batch == batch]:
            (reason,) = await self._leases.cancelled([batch])
            self._in_flight.abort(of_batch, "cancelled", reason)

    def _running(self, request_ids: set[str]) -> Iterator[Running]:
        return (r for r in self._in_flight if r.delivery.request_id in request_ids)

    async def _catch_up(self) -> None:
        """Abort requests that have ended or were cancelled while no message could be received."""
        running = [r for r in self._in_flight if not r.ended]
        flags = await self._leases.ended([r.delivery for r in running])
        ended = [r for r, flag in zip(running, flags, strict=True) if flag]
        self._in_flight.abort(ended, "cancelled")
        batches = sorted({r.delivery.batch for r in running} - {""})
        reasons = await self._leases.cancelled(batches)
        for batch, reason in zip(batches, reasons, strict=True):
            if reason:
                of_batch = (r for r in running if r.delivery.batch == batch)
                self._in_flight.abort(of_batch, "cancelled", reason)
