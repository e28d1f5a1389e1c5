"""Takes, renews, ends and hands back leases by the scripts POP, RENEW, DONE, RELEASE and SWEEP.

The scripts are in worker/lua. Writes of results are retried until Redis is back, so that no result
is computed twice. POP is not retried here, because the drain's loop has other work meanwhile.
"""

import datetime as dt
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from contract import naming
from contract.batch import BY_USER
from contract.errors import RequestRejected, StoreRefused
from contract.message import Delivery, read_delivery
from contract.redis import keys
from contract.redis.connect import connect_async
from contract.redis.known import known_text
from contract.streaming import Piece, encode_pieces
from worker.drain.endings import Ending, done_arguments, log_extra, with_error
from worker.drain.known import known_of
from worker.drain.scripts import ALWAYS_TAKEN_BYTES, ERRORS, Scripts
from worker.drain.wakeup import Arrivals
from worker.settings import WorkerSettings

log = logging.getLogger(__name__)

#: Most seconds of one wait for a message that Redis pushes; then the connection is tested.
WAKE_BLOCK_S = 5
#: Most leases that one SWEEP returns to the queue, so that the script runs for a short time.
SWEEP_LIMIT = 250
#: Most bytes of messages in one POP, during which Redis serves no other client. The first message
#: may be larger.
POP_BYTES = 2 * 2**20


@dataclass(slots=True)
class Popped:
    """The reply of POP.

    `now` is Redis's time in seconds. `more`: the lists may have more messages for this worker.
    `suspects` is the number of suspects in the queue, `group` the number of them that run together
    next, 0 if none is set.
    """

    now: float
    deliveries: list[Delivery] = field(default_factory=list)
    more: bool = False
    suspects: int = 0
    group: int = 0


def _date() -> str:
    return dt.datetime.now(dt.UTC).isoformat()


class Leases:
    """The leases of one worker, and its other commands to Redis."""

    def __init__(self, settings: WorkerSettings, worker_id: str, part_of: str = "") -> None:
        """Prepare; a front end is `part_of` a worker, which runs suspects for its front ends."""
        self.worker_id, self.part_of = worker_id, part_of
        self.queue = settings.queue_to_drain
        self.settings = settings
        url = settings.redis_url.get_secret_value()
        # Typed Any: redis-py types a reply as any of several types, and this client gets bytes.
        self._client: Any = connect_async(url, f"warmq-{worker_id}", settings.redis_timeout_s)
        self.scripts = Scripts(self._client, self.queue)
        #: Whether this worker runs the suspects of its queue; the lock for this expires by itself.
        self.holds_suspects_lock = False
        self._has_left = False
        #: The number of POPs that were sent.
        self._pops = 0
        self._arrivals = Arrivals(self._client, naming.keys_with_work(self.queue))
        online = naming.turns_key(self.queue, naming.PRIORITY_STEPS[0])
        self._online_arrivals = Arrivals(self._client, [online], warns=False)
        #: The highest lease number known.
        self._highest = 0
        #: `_highest` at the sending of each POP whose reply is not read yet.
        self._open_pops: list[int] = []
        #: The list whose turn goes on, and how many sequences it may still give in this turn.
        self._turn: tuple[bytes | str, int] = "", 0

    async def pop(
        self, count: int, slots: int, lists: Sequence[str] | None = None,
        max_bytes: float = math.inf, most_multi: int = 0, context: int = 0,
        excluded: Sequence[str] = (), urgent: Sequence[str] = (),
    ) -> Popped:  # fmt: skip
        """Lease up to `count` requests, at most `most_multi` of them with several sequences.

        With `lists`, messages are taken from these only; without, those in `urgent` come first in
        their tenants' turns. None is of a tenant in `excluded`. `context` is the model's context
        length in tokens, 0 if it is unknown; it limits a request's estimated cost. The caller must
        add the deliveries to its own leases before it awaits anything else: `renew` hands back
        leases that its caller does not name. Raises StoreUnavailable if Redis does not answer.
        """
        settings = self.settings
        self._pops += 1
        began = self._highest
        self._open_pops.append(began)
        try:
            reply = await self.scripts.run(
                "pop", self.worker_id, self.queue, count, min(POP_BYTES, max_bytes),
                settings.lease_ms, slots, settings.result_ttl_ms, _date(), self._highest,
                *self._turn, most_multi, context, "".join(f"{tenant}\6" for tenant in excluded),
                *(lists or (["", *urgent] if urgent else ())),
            )  # fmt: skip
            now_ms, suspects, group, more, highest, turn, turn_left, *leased = reply
            self._highest = max(self._highest, highest)
            self._turn = turn, turn_left
            popped = Popped(now_ms / 1000, more=more == 1, suspects=suspects, group=int(group))
            await self._read(leased, popped)
            return popped
        finally:
            self._open_pops.remove(began)

    async def _read(self, leased: list[Any], popped: Popped) -> None:
        """Add the leases of a reply to `popped`; each has six fields (worker/lua/pop.lua)."""
        for i in range(0, len(leased), 6):
            lease, returns, deaths, message, tenant, requeued_at = leased[i : i + 6]
            try:
                delivery = read_delivery(lease.decode(), message, int(returns), int(deaths))
            except RequestRejected as error:
                await self._bury(lease.decode(), error.message)
            else:
                delivery.tenant = str(tenant, "utf-8", "replace")
                delivery.requeued_at = int(requeued_at or 0)
                popped.deliveries.append(delivery)

    async def _bury(self, lease: str, reason: str) -> None:
        """Make a leased message that cannot be read a dead letter."""
        log.warning("dead letter: %s", reason, extra={"action": "dead_letter"})
        ttl_ms = self.settings.result_ttl_ms
        await self.scripts.until_done("bury", self.worker_id, lease, reason, ttl_ms, _date())

    async def done(self, endings: Sequence[Ending]) -> int:
        """Commit endings; return how many results were written. Existing results are kept.

        If Redis refuses a result, the request fails with that error.
        """
        fitting = [
            ending if len(ending.meta) <= ALWAYS_TAKEN_BYTES else await self._fitting(ending)
            for ending in endings
        ]
        try:
            written = await self._done(fitting)
            await self._note_known(fitting)
            return written
        except StoreRefused as error:
            if len(fitting) > 1:
                return sum([await self.done([ending]) for ending in fitting])
            text = f"the result of {len(fitting[0].meta)} bytes was not stored. {error.message}"
            return await self._fail(with_error(fitting[0], text, "result_refused"))

    async def _done(self, endings: Sequence[Ending]) -> int:
        ttl_ms, args = self.settings.result_ttl_ms, done_arguments(endings)
        return int(await self.scripts.until_done("done", self.worker_id, ttl_ms, *args))

    async def _note_known(self, endings: Sequence[Ending]) -> None:
        """Note the answers that may be reused; without the note they are computed again."""
        settings = self.settings
        for tenant, answers in known_of(endings).items():
            most, ttl_ms = settings.known_answers, settings.result_ttl_ms
            try:
                await self.scripts.run("know", tenant, most, ttl_ms, known_text(answers))
            except ERRORS as error:
                log.debug("known answers were not noted: %s", error)

    async def _fitting(self, ending: Ending) -> Ending:
        """Return the ending, with an error in place of a result that is too large for Redis."""
        size, limit = len(ending.meta), await self.scripts.max_bytes()
        if size <= limit:
            return ending
        text = (
            f"the result has {size} bytes, and Redis takes {limit} in one value: ask for less, or "
            "raise Redis's proto-max-bulk-len"
        )
        return with_error(ending, text, "result_too_large")

    async def _fail(self, ending: Ending) -> int:
        try:
            return await self._done([ending])
        except StoreRefused as error:
            delivery = ending.delivery
            extra = log_extra(delivery, "result_refused")
            text = "request %s has no result, its lease will end: %s"
            log.error(text, delivery.request_id, error, extra=extra)
            return 0

    async def release(self, deliveries: Sequence[Delivery], died: frozenset[str]) -> None:
        """Hand deliveries back; `died` names the leases that were in a dead engine."""
        await self._release([d.lease for d in deliveries], died)

    async def _release(self, leases: Sequence[str], died: frozenset[str] = frozenset()) -> None:
        common = (self.worker_id, self.settings.max_deaths, self.settings.result_ttl_ms)
        newest_first = sorted(leases, key=lease_number, reverse=True)
        pairs = [value for lease in newest_first for value in (lease, int(lease in died))]
        try:
            _, more = await self.scripts.until_done("release", *common, _date(), *pairs)
            while more:  # one call moves a few megabytes of messages
                _, more = await self.scripts.until_done("release", *common, _date())
        except StoreRefused as error:
            text = "%d requests return when their leases end: %s"
            log.error(text, len(leases), error, extra={"action": "release_refused"})

    async def renew(self, leases: Sequence[str]) -> list[str]:
        """Extend leases; return those that this worker no longer has.

        Leases that only Redis knows, because the reply of their POP was lost, are handed back.
        A lease with a higher number than was known when the oldest open POP was sent is not handed
        back: that POP's reply may have it.
        """
        pops, highest = self._pops, min(self._open_pops, default=self._highest)
        no_pop = not self._open_pops
        lost, unnamed = await self.scripts.run(
            "renew", self.worker_id, self.settings.lease_ms, *leases
        )
        no_pop = no_pop and pops == self._pops  # no POP was open during RENEW
        names = (raw.decode() for raw in unnamed)
        reply_lost = [lease for lease in names if no_pop or lease_number(lease) <= highest]
        if reply_lost:
            text = "handing back %d leases whose POP reply was lost"
            log.warning(text, len(reply_lost), extra={"action": "lost_pop"})
            await self._release(reply_lost)
        return [raw.decode() for raw in lost]

    async def sweep(self, announcement: bytes) -> int:
        """Return expired leases to the queue, and write this worker's announcement.

        Return the number of these leases; -1 while SWEEP waits for renewals (worker/lua/sweep.lua).
        """
        if self._has_left:
            return 0
        settings = self.settings
        count = await self.scripts.run(
            "sweep", settings.lease_ms, settings.max_deaths, settings.result_ttl_ms, _date(),
            SWEEP_LIMIT, self.worker_id, announcement, self.queue,
        )  # fmt: skip
        return int(count)

    async def waiting(self) -> int:
        """Return the number of messages in the queue's lists."""
        pipe = self._client.pipeline(transaction=False)
        pipe.hget(naming.turns_key(self.queue), "waiting")
        for key in naming.priority_lists(self.queue):
            pipe.llen(key)
        return sum(int(count or 0) for count in await pipe.execute())

    async def leave(self) -> None:
        """Remove this worker's announcement; later sweeps do nothing."""
        self._has_left = True
        await self._client.hdel(keys.WORKERS, self.worker_id)

    async def wait_for_message(self) -> bool:
        """Wait until POP would find a message; return False after a few seconds without one."""
        return await self._arrivals.wait(min(WAKE_BLOCK_S, self.settings.redis_timeout_s / 2))

    async def wait_for_online(self) -> bool:
        """Wait until a request of the highest priority waits; False after some seconds without."""
        wait = self._online_arrivals.wait
        return await wait(min(WAKE_BLOCK_S, self.settings.redis_timeout_s / 2))

    async def close(self) -> None:
        """Close all connections."""
        await self._arrivals.close()
        await self._online_arrivals.close()
        await self._client.aclose()

    async def cancelled(self, batches: Sequence[str]) -> list[str]:
        """Return for each batch the reason why it is cancelled, '' if it is not."""
        pipe = self._client.pipeline(transaction=False)
        for batch in batches:
            pipe.hmget(keys.batch_key(batch), "cancelling", "stopped", "reason")
        found = await pipe.execute() if batches else []
        return [
            (reason.decode(errors="replace") if stopped and reason else BY_USER) if flag else ""
            for flag, stopped, reason in found
        ]

    async def ended(self, deliveries: Sequence[Delivery]) -> list[bool]:
        """Return for each request whether it needs no worker: it or its batch has ended.

        A result in an unfinished batch has no time to live (PTTL -1). A result with a time to live
        under the same id is that of a request without a batch. PTTL -2: there is no result.
        """
        if not deliveries:
            return []
        pipe = self._client.pipeline(transaction=False)
        for delivery in deliveries:
            pipe.pttl(keys.result_key(delivery.request_id))
        batches = sorted({d.batch for d in deliveries if d.batch})
        for batch in batches:
            pipe.hmget(keys.batch_key(batch), "life", "created_at", "finished_at")
        replies = await pipe.execute()
        states = dict(zip(batches, replies[len(deliveries) :], strict=True))
        open_lives = {
            b: (life or created).decode()
            for b, (life, created, finished) in states.items()
            if created and not finished
        }
        return [
            pttl == -1 or (open_lives.get(d.batch) != d.life if d.batch else pttl != -2)
            for pttl, d in zip(replies, deliveries, strict=False)
        ]

    async def revoke(self, request_ids: Sequence[str], keep_s: float) -> None:
        """Record Celery's revocations, so that POP drops these requests in any queue."""
        await self.scripts.run("revoke", int(keep_s), *request_ids)

    def subscribe(self) -> Any:
        """Return a pub/sub connection that has no subscription yet."""
        return self._client.pubsub()

    async def publish_texts(self, pieces: Mapping[str, Sequence[Piece]]) -> dict[str, int]:
        """Publish each listener's pieces; return by listener how many connections got them."""
        if not pieces:
            return {}
        pipe = self._client.pipeline(transaction=False)
        for listener, its_pieces in pieces.items():
            pipe.publish(naming.text_channel(listener), encode_pieces(its_pieces))
        return dict(zip(pieces, await pipe.execute(), strict=True))

    async def take_suspects_lock(self) -> bool:
        """Take the lock for this queue's suspects, unless another worker has it."""
        if not self.part_of:
            self.holds_suspects_lock = await self._lock_suspects(self.settings.lease_ms)
        return self.holds_suspects_lock

    async def renew_suspects_lock(self) -> None:
        """Extend the lock for suspects, if this worker has it."""
        if self.holds_suspects_lock:
            await self._lock_suspects(self.settings.lease_ms)

    async def drop_suspects_lock(self) -> None:
        """Release the lock for suspects, so that another worker may run them."""
        if self.holds_suspects_lock:
            self.holds_suspects_lock = False
            await self._lock_suspects(0)

    async def _lock_suspects(self, ttl_ms: int) -> bool:
        suspects = keys.suspects_list(self.queue)
        return bool(await self.scripts.run("suspects_lock", suspects, self.worker_id, ttl_ms))

    async def note_history(self, numbers: Sequence[int]) -> None:
        """Add counts, in the order of worker/lua/ring.lua, to the history of the current minute."""
        await self.scripts.run("ring", self.queue, self.part_of or self.worker_id, *numbers)

    async def note_machine(self, report: bytes, ttl_ms: int) -> None:
        """Write this worker's memory and last log lines, which expire after `ttl_ms`."""
        await self._client.set(keys.machine_key(self.worker_id), report, px=ttl_ms)

    async def has_deadlines(self) -> bool:
        """Return whether requests wait whose batches have deadlines."""
        return bool(await self._client.exists(naming.deadlines_key(self.queue)))

    # -- batches that have ended ----------------------------------------------------

    async def batches_to_end(self, count: int) -> list[str]:
        """Return up to `count` ids of batches to retire, or whose delete was interrupted."""
        return [raw.decode() for raw in await self._client.zrange(keys.RETIRING, 0, count - 1)]

    async def life_of(self, batch_id: str) -> bytes:
        """Return a batch's `life`, a random text made at its creation; b'' if it is gone."""
        return await self._client.hget(keys.batch_key(batch_id), "life") or b""

    async def batch_fields(self, batch_id: str) -> dict[str, str]:
        """Return the fields of a batch's hash; {} if it is gone."""
        found = await self._client.hgetall(keys.batch_key(batch_id))
        return {name.decode(): value.decode(errors="replace") for name, value in found.items()}

    async def webhook_secret(self) -> str:
        """Return the secret that signs webhooks of batches; '' if no batch has one."""
        return (await self._client.get(keys.NOTIFY_SIGNING) or b"").decode()

    async def index_chunks(self, batch_id: str, start: int, count: int) -> list[bytes]:
        """Return up to `count` chunks of a batch's index, as bytes of contract/index.py."""
        key = keys.batch_key(batch_id, "index")
        return list(await self._client.lrange(key, start, start + count - 1))


def lease_number(lease: str) -> int:
    """Return the number in a lease id; later leases have higher numbers."""
    return int(lease.rpartition("/")[2])
