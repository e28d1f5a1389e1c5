"""What runs beside the drain: leases are renewed, expired ones swept, cancels heard,
a hung engine noticed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterator
from typing import Any

import orjson

from contract.redis import keys
from worker.drain.in_flight import Running
from worker.drain.leases import Leases
from worker.drain.loop import Drain
from worker.drain.retiring import retire_some
from worker.drain.scripts import ERRORS
from worker.drain.streaming import Streaming
from worker.settings import WorkerSettings

log = logging.getLogger(__name__)

SWEEP_S = 1.0
RECONNECT_S = 0.5
#: Celery forgets a revocation after three hours too (celery.worker.state.REVOKE_EXPIRES).
REVOKE_KEEP_S = 10800.0


class Upkeep:
    """Side tasks of one drain; each survives Redis being away."""

    def __init__(self, settings: WorkerSettings, leases: Leases, drain: Drain) -> None:
        self._settings = settings
        self._leases = leases
        self._drain = drain
        self._streaming = Streaming(leases, drain)

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        """Return the coroutines to run."""
        return [
            self._renew(), self._sweep(), self._listen(), self._watch(), self._streaming.run()
        ]  # fmt: skip

    async def _renew(self) -> None:
        pause = self._settings.lease_s / 3
        while True:
            await asyncio.sleep(pause)
            try:
                lost = await self._leases.renew(self._drain.in_flight.leases())
                if self._drain.holds_suspects_lock:
                    await self._leases.take_suspects_lock()
            except ERRORS as error:
                log.warning("cannot renew leases: %s", error, extra={"action": "redis_lost"})
                pause = min(1.0, self._settings.lease_s / 12)  # a third would risk the leases
                continue
            pause = self._settings.lease_s / 3
            held = (self._drain.in_flight.get(lease) for lease in lost)
            gone = [r for r in held if r is not None and not r.ended]
            if gone:
                log.warning(
                    "%d leases were lost, their work is aborted", len(gone),
                    extra={"action": "lease_lost"},
                )  # fmt: skip
                self._drain.in_flight.abort(gone, "lost")

    async def _sweep(self) -> None:
        pause = min(SWEEP_S, self._settings.lease_s / 8)
        away_since = 0.0
        while True:
            await asyncio.sleep(pause)
            try:
                count = await self._leases.sweep(self._announcement())
                await retire_some(self._leases)
            except ERRORS as error:
                if not away_since:  # an idle worker would say nothing else about it
                    away_since = time.monotonic()
                    log.warning("Redis: %s; waiting for it", error, extra={"action": "redis_lost"})
                continue
            if away_since:
                away_s, away_since = time.monotonic() - away_since, 0.0
                log.info("Redis is back after %.1f s", away_s, extra={"action": "redis_back"})
            if count > 0:
                log.warning(
                    "%d requests of a dead worker go back to the queue", count,
                    extra={"action": "swept"},
                )  # fmt: skip
            self._drain.poke()

    def _announcement(self) -> bytes:
        drain = self._drain
        return orjson.dumps({
            "state": drain.supervisor.state.value,
            "queue": self._leases.queue,
            "model": self._settings.model,
            "in_flight": len(drain.in_flight),
            "limit": drain.limit,
        })  # fmt: skip

    async def _listen(self) -> None:
        """Abort what is cancelled; after a lost connection ask for what was missed."""
        while True:
            pubsub = self._leases.subscribe()
            try:
                await pubsub.subscribe(
                    keys.CANCEL_CHANNEL, keys.BATCH_CANCEL_CHANNEL, keys.LISTEN_CHANNEL
                )
                await self._catch_up()
                await self._hear(pubsub)
            except ERRORS as error:
                log.debug("cancel channel: %s", error)
                await asyncio.sleep(RECONNECT_S)
            finally:
                await pubsub.aclose()

    async def _hear(self, pubsub: Any) -> None:
        """Abort what is named. A connection that answers no PING either is given up."""
        asked = False
        while True:
            message = await pubsub.get_message(timeout=self._settings.redis_timeout_s)
            if message is not None:
                asked = False
                if message["type"] == "message":
                    self._take(message)
            elif asked:
                raise ConnectionError("the connection is deaf")
            else:
                asked = True
                await pubsub.ping()

    def _take(self, message: dict[str, Any]) -> None:
        channel = message["channel"].decode()
        try:
            if channel == keys.LISTEN_CHANNEL:
                self._streaming.heard(message["data"])
            else:
                self._drain.in_flight.abort(self._named(channel, message["data"]), "cancelled")
        except (ValueError, TypeError):  # anybody may publish anything; no worker dies of it
            log.warning("ignored what came on %s", channel, extra={"action": "bad_message"})

    def _named(self, channel: str, data: bytes) -> Iterator[Running]:
        running = list(self._drain.in_flight)
        if channel == keys.BATCH_CANCEL_CHANNEL:
            batch = data.decode()
            return (r for r in running if r.delivery.batch == batch)
        ids = {str(rid) for rid in orjson.loads(data)}
        return (r for r in running if r.delivery.request_id in ids)

    async def _catch_up(self) -> None:
        running = [r for r in self._drain.in_flight if not r.ended]
        flags = await self._leases.ended([r.delivery for r in running])
        ended = [r for r, flag in zip(running, flags, strict=True) if flag]
        self._drain.in_flight.abort(ended, "cancelled")

    async def _watch(self) -> None:
        """Kill an engine that makes no step while requests are in it.

        What counts is the time with requests in it and without a step, whichever requests these
        are: in a hung engine they may expire or be cancelled one after the other. It is counted in
        looks, not read from a clock: a worker that was stopped itself has seen no step either.
        """
        limit_s = self._settings.stall_timeout_s
        pause_s = min(1.0, limit_s / 4)
        latest = stalled_s = 0.0
        while True:
            await asyncio.sleep(pause_s)
            supervisor = self._drain.supervisor
            if not supervisor.running:
                stalled_s = 0.0
                continue
            if not self._drain.in_flight.tasks():
                if supervisor.dead():
                    self._drain.poke()  # rebuilt now, not when the next request has come
                continue
            step = supervisor.engine.last_progress()
            stalled_s = stalled_s + pause_s if step == latest else 0.0
            latest = step
            if stalled_s > limit_s:
                stalled_s = 0.0
                log.error(
                    "the engine made no step for %.0f s with requests in flight: killing it",
                    limit_s, extra={"action": "engine_hung"},
                )  # fmt: skip
                if supervisor.dead():  # killed before, and its library tells nobody
                    self._drain.in_flight.abort(self._drain.in_flight, "died")
                supervisor.kill()

    async def revoke(self, request_ids: list[str]) -> None:
        """Celery's revoke: abort what runs here, remember the rest for POP."""
        await self._leases.revoke(request_ids, REVOKE_KEEP_S)
        wanted = set(request_ids)
        running = self._drain.in_flight
        running.abort([r for r in running if r.delivery.request_id in wanted], "cancelled")
