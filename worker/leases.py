"""The worker's side of the lease protocol: POP, DONE, RELEASE, RENEW, SWEEP.

Writes are retried for as long as it takes: a result that was computed is kept
until Redis is back, never computed again. Only POP gives up at once, because
the drain has other things to look at.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import RedisError

from contract import keys
from contract.connect import connect_async, is_read_only
from contract.errors import RequestRejected, StoreUnavailable
from contract.index import IndexChunk
from contract.message import Delivery, read_delivery
from contract.scripts import source
from contract.streaming import STREAM_ENTRIES, STREAM_TTL_MS, Entry
from worker.settings import WorkerSettings

log = logging.getLogger(__name__)

#: Seconds a BLMOVE blocks; a wake-up comes at once, this only bounds a dead socket.
WAKE_BLOCK_S = 5
#: Leases put back in one SWEEP call, so that the script stays short.
SWEEP_LIMIT = 500
#: Batches and results retired between two sweeps; with thousands of small batches one at a
#: time would take hours.
RETIRE_BATCHES = 100
RETIRE_RESULTS = 10_000
ERRORS = (RedisError, OSError)


@dataclass(slots=True)
class Popped:
    """What POP brought. `now` is Redis time in seconds; `more` says the lists hold more."""

    now: float
    deliveries: list[Delivery] = field(default_factory=list)
    more: bool = False
    suspects: int = 0
    group: int = 0


@dataclass(frozen=True, slots=True)
class Ending:
    """How one delivery ended; an empty outcome only drops the lease."""

    delivery: Delivery
    outcome: str
    meta: bytes = b""
    keep: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0


def _date() -> str:
    return dt.datetime.now(dt.UTC).isoformat()


class Leases:
    """Leases of one worker in one Redis."""

    def __init__(self, settings: WorkerSettings, worker_id: str) -> None:
        self.worker_id = worker_id
        self.queue = settings.queue_to_drain
        self.errors = 0
        self._settings = settings
        self._url = settings.redis_url.get_secret_value()
        # redis-py types every reply as bytes or str or more; this client never decodes.
        self._redis: Any = connect_async(self._url, f"warmq-{worker_id}", settings.redis_timeout_s)
        self._scripts = {
            name: self._redis.register_script(source(name))
            for name in ("pop", "done", "release", "renew", "sweep", "bury", "retire")
        }
        self._give_up_at = math.inf
        self._pops = 0
        self._highest = 0
        self._popping = 0

    def give_up_in(self, seconds: float) -> None:
        """Stop trying to write after so many seconds: the process wants to end."""
        self._give_up_at = min(self._give_up_at, time.monotonic() + seconds)

    async def _run(self, name: str, *args: Any) -> Any:
        try:
            return await self._scripts[name](args=args)
        except ERRORS as error:
            if is_read_only(error):
                # This server has become a replica: a new connection may find the primary.
                await self._redis.connection_pool.disconnect(inuse_connections=False)
            raise

    async def _until_done(self, name: str, *args: Any) -> Any:
        delay = 0.05
        while True:
            try:
                return await self._run(name, *args)
            except ERRORS as error:
                self.errors += 1
                if time.monotonic() > self._give_up_at:
                    raise StoreUnavailable(
                        f"Redis is away while stopping ({error}); what is leased returns to the "
                        "queue when its lease ends"
                    ) from error
                log.warning(
                    "Redis refused %s, trying again: %s", name, error,
                    extra={"action": "redis_retry"},
                )  # fmt: skip
                await asyncio.sleep(delay)
                delay = min(1.0, delay * 2)

    async def pop(
        self, k: int, slots: int, lists: Sequence[str] | None = None, max_bytes: float = math.inf
    ) -> Popped:
        """Lease up to k requests. Raises RedisError or OSError if Redis does not answer."""
        s = self._settings
        self._pops += 1
        self._popping += 1
        try:
            reply = await self._run(
                "pop", self.worker_id, self.queue, k, min(s.pop_bytes, max_bytes), s.lease_ms,
                slots, s.result_ttl_ms, _date(), self._highest,
                *(lists or keys.priority_lists(self.queue)),
            )  # fmt: skip
        finally:
            self._popping -= 1
        popped = Popped(reply[0] / 1000, more=reply[3] == 1, suspects=reply[1], group=int(reply[2]))
        for i in range(4, len(reply), 4):
            lease, returns, deaths, message = reply[i : i + 4]
            self._highest = max(self._highest, lease_number(lease.decode()))
            try:
                delivery = read_delivery(lease.decode(), message, int(returns), int(deaths))
            except RequestRejected as error:
                await self._bury(lease.decode(), error.message)
            else:
                popped.deliveries.append(delivery)
        return popped

    async def _bury(self, lease: str, reason: str) -> None:
        """Move a leased message that cannot be read to the dead letters."""
        log.warning("dead letter: %s", reason, extra={"action": "dead_letter"})
        ttl_ms = self._settings.result_ttl_ms
        await self._until_done("bury", self.worker_id, lease, reason, ttl_ms, _date())

    async def done(self, endings: Sequence[Ending]) -> int:
        """Commit endings; returns how many results were written (the rest existed)."""
        args: list[Any] = []
        for e in endings:
            d = e.delivery
            args += (
                d.lease, d.request_id, d.batch, d.created, _stored_outcome(e), int(e.keep),
                e.prompt_tokens, e.completion_tokens, e.meta,
            )  # fmt: skip
        return int(
            await self._until_done("done", self.worker_id, self._settings.result_ttl_ms, *args)
        )

    async def release(self, deliveries: Sequence[Delivery], died: frozenset[str]) -> int:
        """Hand deliveries back; `died` names the leases that were inside a dead engine."""
        newest_first = sorted(deliveries, key=lambda d: -lease_number(d.lease))
        return await self._release_ids(
            [d.lease for d in newest_first], {d.lease for d in newest_first if d.lease in died}
        )

    async def _release_ids(self, leases: Sequence[str], died: set[str]) -> int:
        s = self._settings
        pairs = [part for lease in leases for part in (lease, int(lease in died))]
        return int(
            await self._until_done(
                "release", self.worker_id, s.max_deaths, s.result_ttl_ms, _date(), *pairs
            )
        )

    async def renew(self, leases: Sequence[str]) -> list[str]:
        """Prolong leases; returns those that are lost. Hands back what we do not know of.

        A lease is unknown when the reply of its POP was lost; while a POP is
        under way that cannot be told apart from one that is just arriving.
        """
        pops = self._pops
        quiet = self._popping == 0
        lost, unknown = await self._run("renew", self.worker_id, self._settings.lease_ms, *leases)
        if unknown and quiet and pops == self._pops:
            log.warning(
                "handing back %d leases whose POP reply was lost", len(unknown),
                extra={"action": "lost_pop"},
            )  # fmt: skip
            newest_first = sorted((raw.decode() for raw in unknown), key=lambda i: -lease_number(i))
            await self._release_ids(newest_first, set())
        return [raw.decode() for raw in lost]

    async def sweep(self, announcement: bytes) -> int:
        """Put expired leases of dead workers back; returns how many, -1 while holding.

        `announcement` is what producers are told about this worker, as JSON.
        """
        s = self._settings
        count = await self._run(
            "sweep", s.lease_ms, s.max_deaths, s.result_ttl_ms, _date(), SWEEP_LIMIT,
            self.worker_id, announcement,
        )  # fmt: skip
        return int(count)

    async def leave(self) -> None:
        """Take this worker's announcement back."""
        await self._redis.hdel(keys.WORKERS, self.worker_id)

    async def wait_for_message(self, list_key: str) -> bool:
        """Block until the list is not empty; False after a few seconds of nothing."""
        block_s = min(WAKE_BLOCK_S, self._settings.redis_timeout_s / 2)
        moved = await self._redis.blmove(list_key, list_key, block_s, "RIGHT", "RIGHT")
        return moved is not None

    async def ended(self, request_ids: Sequence[str]) -> list[str]:
        """Return those requests that have a terminal result already."""
        if not request_ids:
            return []
        pipe = self._redis.pipeline(transaction=False)
        for request_id in request_ids:
            pipe.exists(keys.result_key(request_id))
        flags = await pipe.execute()
        return [rid for rid, flag in zip(request_ids, flags, strict=True) if flag]

    async def revoke(self, request_ids: Sequence[str], keep_s: float) -> None:
        """Remember Celery's revocations, so that POP drops these requests wherever they wait."""
        now = dt.datetime.now(dt.UTC).timestamp()
        await self._redis.zremrangebyscore(keys.REVOKED, "-inf", now)
        await self._redis.zadd(keys.REVOKED, {rid: now + keep_s for rid in request_ids})

    async def stream(self, writes: Iterable[tuple[str, list[Entry], bool]]) -> None:
        """Append entries to requests' streams, each (request id, entries, whether from nothing).

        All or nothing, so that a write may be repeated; a key that is no stream is passed over.
        """
        pipe = self._redis.pipeline(transaction=True)
        for request_id, entries, anew in writes:
            key = keys.stream_key(request_id)
            if anew:
                pipe.delete(key)
            for entry in entries:
                pipe.xadd(key, entry, maxlen=STREAM_ENTRIES)
            pipe.pexpire(key, STREAM_TTL_MS)
        await pipe.execute(raise_on_error=False)

    def subscribe(self) -> Any:
        """Return a pub/sub connection, not subscribed yet."""
        return self._redis.pubsub()

    async def take_suspects_lock(self) -> bool:
        """Become, or stay, the one worker that runs suspects of this queue."""
        key = keys.suspects_list(self.queue) + ":lock"
        ttl_ms = self._settings.lease_ms
        if await self._redis.set(key, self.worker_id, nx=True, px=ttl_ms):
            return True
        if await self._redis.get(key) != self.worker_id.encode():
            return False
        await self._redis.pexpire(key, ttl_ms)
        return True

    async def drop_suspects_lock(self) -> None:
        """Let another worker run suspects; with none left the next ones are halved anew."""
        suspects = keys.suspects_list(self.queue)
        if await self._redis.get(suspects + ":lock") == self.worker_id.encode():
            if not await self._redis.exists(suspects):
                await self._redis.delete(suspects + ":group")
            await self._redis.delete(suspects + ":lock")

    async def retire_some(self) -> int:
        """Give some finished batches' results their expiry; returns results handled."""
        count = 0
        for raw in await self._redis.zrange(keys.RETIRING, 0, RETIRE_BATCHES - 1):
            count += await self._retire(raw.decode())
            if count >= RETIRE_RESULTS:
                break
        return count

    async def _retire(self, batch_id: str) -> int:
        """Retire one batch.

        The index goes after the results, so that an interruption repeats work
        instead of losing the way to a result.
        """
        ttl = self._settings.result_ttl_ms
        count = start = 0
        while raws := await self._redis.lrange(keys.batch_key(batch_id, "index"), start, start + 1):
            ids = [rid for raw in raws for rid in IndexChunk.load(raw).request_ids(batch_id)]
            if not await self._run("retire", batch_id, ttl, 0, *ids):
                return count
            count += len(ids)
            start += len(raws)
        await self._run("retire", batch_id, ttl, 1)
        return count

    async def close(self) -> None:
        """Close all connections."""
        await self._redis.aclose()


def _stored_outcome(ending: Ending) -> str:
    """Return what DONE is told: a plain Celery client may want no result at all."""
    unwanted = ending.delivery.ignore_result and not ending.delivery.batch
    return "ignored" if ending.outcome and unwanted else ending.outcome


def lease_number(lease: str) -> int:
    """Return the counter in a lease id: later leases have higher numbers."""
    return int(lease.rpartition("/")[2])
