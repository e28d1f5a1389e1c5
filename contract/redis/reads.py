"""Reads batches, queues and workers, in a few round trips that do not grow with a batch."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Self

import redis

from contract import naming
from contract.batch import Batch
from contract.errors import ProtocolMismatch, StoreForbidden
from contract.redis import keys
from contract.redis.announcements import (
    WORKER_SILENT_S,
    is_alive,
    queues_of,
    read_announcements,
)
from contract.redis.client import Client
from contract.redis.connect import Reconnects
from contract.redis.foreign_keys import UnreadList, types_of, unread_lists, wrong_types
from contract.runs import joined
from contract.streaming import Listener
from contract.version import PROTOCOL, version

#: Most commands in one round trip, because Redis serves no other client meanwhile.
PAGE = 250


def check_protocol(batch: Batch) -> Batch:
    """Return the batch, if this version of warmq can read it.

    Raises:
        ProtocolMismatch: the batch is of a newer warmq, or of 0.1.0.
    """
    if batch.protocol > PROTOCOL:
        raise ProtocolMismatch(
            f"batch {batch.id} was queued by a newer warmq (protocol {batch.protocol}; this "
            f"one, {version()}, knows {PROTOCOL}): upgrade this one"
        )
    if not batch.life:
        raise ProtocolMismatch(
            f"batch {batch.id} was queued by warmq 0.1.0 (protocol 1), which this one, "
            f"{version()}, does not read: finish, collect or delete it with 0.2.0"
        )
    return batch


class Reads:
    """Reads from one Redis. Each call raises StoreUnavailable if it cannot be used."""

    def __init__(self, client: redis.Redis) -> None:
        self._raw_client = client
        # Typed Any: redis-py types a reply as any of several types, and this client gets bytes.
        self._client: Any = Client(connection_pool=client.connection_pool)

    def _run(self, name: str, *args: Any) -> Any:
        """Run a script and return its reply."""
        return self._client.run_script(name, *args)

    @classmethod
    def using(cls, other: Reads) -> Self:
        """Return an object that uses the connections of `other`."""
        return cls(other._raw_client)

    def close(self) -> None:
        """Close the client that was given to __init__, and all its connections."""
        self._raw_client.close()

    @property
    def reconnects(self) -> int:
        """How often connections broke and were made again; Redis may have been away."""
        made = self._client.connection_pool.connection_kwargs.get("redis_connect_func")
        return made.count if isinstance(made, Reconnects) else 0

    def ping(self) -> None:
        """Check that Redis answers."""
        self._client.ping()

    def now_ms(self) -> int:
        """Return Redis's time, in ms since 1970."""
        seconds, microseconds = self._client.time()
        return int(seconds) * 1000 + int(microseconds) // 1000

    # -- batches ----------------------------------------------------------------

    def batch(self, batch_id: str) -> Batch | None:
        """Return the state of a batch, None if it does not exist.

        Raises:
            ProtocolMismatch: the batch is of a newer warmq, or of 0.1.0.
        """
        before = self.reconnects
        raw = self._client.hgetall(keys.batch_key(batch_id))
        batch = Batch(batch_id, _texts(raw.items()), before) if raw else None
        return self.with_windows(check_protocol(batch)) if batch else None

    def with_windows(self, batch: Batch) -> Batch:
        """Return the state of a run that may have windows; another batch as it is."""
        ended = batch.finished and "cancelling" not in batch.fields
        if not batch.is_run or ended:
            return batch
        record, *windows = (
            _texts(zip(flat[::2], flat[1::2], strict=True))
            for flat in self._run("run_state", batch.id)
        )
        if not record:
            return batch
        first, before = int(record["windows"]), batch.reconnects
        found = [Batch(f"{batch.id}.{first + n}", each) for n, each in enumerate(windows) if each]
        return joined(
            Batch(batch.id, record, before), [one for one in found if one.status != "deleting"]
        )

    def states(self, batch_ids: Sequence[str]) -> list[Batch | None]:
        """Return the states of batches, None for a missing one, in one round trip a PAGE."""
        before = self.reconnects
        raws = self._each("hgetall", [keys.batch_key(batch_id) for batch_id in batch_ids])
        pairs = zip(batch_ids, raws, strict=True)
        return [
            self.with_windows(Batch(name, _texts(raw.items()), before)) if raw else None
            for name, raw in pairs
        ]

    def batches(self) -> list[Batch]:
        """Return all batches, newest first, in one round trip for each PAGE of them."""
        before = self.reconnects
        names, first = self._client.run_script("list", PAGE)
        ids = [name.decode() for name in names]
        states = [_texts(zip(flat[::2], flat[1::2], strict=True)) for flat in first]
        pairs = zip(ids, states, strict=False)
        found = [self.with_windows(Batch(b, fields, before)) for b, fields in pairs if fields]
        return found + [batch for batch in self.states(ids[PAGE:]) if batch]

    def newest_ids(self, count: int = 1000) -> list[str]:
        """Return the ids of the newest batches, of which some may have expired just now."""
        return [name.decode() for name in self._client.zrevrange(keys.BATCHES, 0, count - 1)]

    def existing(self, batch_ids: Sequence[str]) -> list[str]:
        """Return the batches that have a state or an index in Redis."""
        pipe = self._client.pipeline(transaction=False)
        for batch_id in batch_ids:
            pipe.exists(keys.batch_key(batch_id), keys.batch_key(batch_id, "index"))
        return [b for b, there in zip(batch_ids, pipe.execute(), strict=True) if there]

    def expires_in_s(self, batch_id: str) -> float | None:
        """Return the seconds until a batch's state expires; None if it has no time to live."""
        left_ms = int(self._client.pttl(keys.batch_key(batch_id)))
        return left_ms / 1000 if left_ms >= 0 else None

    def in_flight(self, batch: Batch) -> int:
        """Return the number of a batch's requests that are leased, also by dead workers."""
        pipe = self._client.pipeline(transaction=False)
        leases = self._client.zrevrange(keys.LEASES, 0, -1, withscores=True)
        # A lease with a negative score is returning to its queue (contract/lua/leases.lua).
        for worker in {lease.rpartition(b"/")[0] for lease, ends in leases if ends > 0}:
            pipe.hgetall(keys.worker_key(worker.decode()))
        records = (raw.split(b"\0", 7) for leased in pipe.execute() for raw in leased.values())
        # The last two fields of a lease's record are its batch's id and life.
        ours = [[part.id.encode(), part.life.encode()] for part in batch.parts]
        return sum(record[6:] in ours for record in records)

    # -- requests and the server --------------------------------------------------

    def listener(self, *request_ids: str) -> Listener:
        """Return a listener that reads these requests' text while they run."""
        return Listener(self._client, request_ids)

    def info(self) -> dict[str, Any]:
        """Return the reply of Redis's INFO: version, role, persistence, memory."""
        return dict(self._client.info())

    def up_s(self) -> float:
        """Return for how many seconds Redis has run, or has been back for this client.

        An outage without a restart is known only to a client whose retry waits for its end
        (producer/outage.py). Infinity if nothing is known.
        """
        try:
            up_s = float(self._client.info("server").get("uptime_in_seconds", "inf"))
        except StoreForbidden:
            up_s = float("inf")
        retry = self._raw_client.connection_pool.connection_kwargs.get("retry")
        back_at = getattr(retry, "back_at", None)
        return up_s if back_at is None else min(up_s, time.monotonic() - back_at)

    # -- queues and workers ---------------------------------------------------------

    def queue_lengths(self, queue: str) -> dict[str, int]:
        """Return the number of messages in each list of a queue, also in that of suspects."""
        lists = [*naming.priority_lists(queue), keys.suspects_list(queue)]
        lists += [list_key for _, _, list_key in self.turns(queue)]
        lists = list(dict.fromkeys(lists))
        return dict(zip(lists, self._each("llen", lists), strict=True))

    def wrong_types(self, queue: str) -> dict[str, str]:
        """Return the keys of a queue that have a type of another program, with this type."""
        names = [*types_of(queue)]
        return wrong_types(queue, dict(zip(names, self._each("type", names), strict=True)))

    def unread_lists(self, queue: str) -> list[UnreadList]:
        """Return lists into which clients put requests of a queue, but which no worker reads."""
        return [*unread_lists(self._client, queue)]

    def turns(self, queue: str, most: int | None = None) -> list[tuple[int, str, str]]:
        """Return the lists of waiting messages, sorted, as (priority step, tenant, list key).

        A list has turns if it has messages; one of kombu's only after a worker has found it. `most`
        limits the tenants of a priority that have not reached their cap (most sequences in flight).
        At most `most` + 1 lists of each tenant are returned.
        """
        rings = [(step, naming.turns_key(queue, step)) for step in naming.PRIORITY_STEPS]
        last, last_list = (-1, -1) if most is None else (most - 1, most)
        waiting = self._each("zrange", [ring for _, ring in rings], 0, last)
        tenants = {
            (step, ring, tenant.decode())
            for (step, ring), found in zip(rings, waiting, strict=True)
            for tenant in found
        }
        for name in self._client.smembers(f"{naming.turns_key(queue)}:capped"):
            step, _, tenant = name.decode().partition("\x06")
            tenants.add((int(step), naming.turns_key(queue, int(step)), tenant))
        found = sorted(tenants)
        names = [f"{ring}\x06{tenant}" for _, ring, tenant in found]
        lists = self._each("zrange", names, 0, last_list)
        return [
            (step, tenant, key.decode())
            for (step, _, tenant), keys_found in zip(found, lists, strict=True)
            for key in keys_found
        ]

    def _each(self, command: str, names: Sequence[str], *args: Any) -> list[Any]:
        """Return a command's reply for each key, in one round trip for PAGE of them."""
        replies: list[Any] = []
        for start in range(0, len(names), PAGE):
            pipe = self._client.pipeline(transaction=False)
            for name in names[start : start + PAGE]:
                getattr(pipe, command)(name, *args)
            replies += pipe.execute()
        return replies

    def workers(self, queue: str) -> list[dict[str, Any]]:
        """Return the announcements of the living workers of a queue."""
        living = [worker for worker in self.announcements(queue) if is_alive(worker)]
        read = ("silent_s", "overdue", "redis_up_s")  # the rest is what the worker wrote
        return [{k: v for k, v in worker.items() if k not in read} for worker in living]

    def served_queues(self) -> set[str]:
        """Return the names of the queues that living workers serve."""
        alive = filter(is_alive, self.announcements())
        return {queue for worker in alive for queue in queues_of(worker)}

    def announcements(
        self, queue: str | None = None, *, merged: bool = True
    ) -> list[dict[str, Any]]:
        """Return the last announcement of each worker of a queue, or of all queues.

        A worker of several models is returned for the queue of each of them. With an overdue one,
        all have `redis_up_s` if Redis came back less than WORKER_SILENT_S ago. Without `merged`
        the front ends of a worker are returned, too.
        """
        pipe = self._client.pipeline(transaction=False)
        raw, (now_s, _) = pipe.hgetall(keys.WORKERS).time().execute()
        found = read_announcements(raw, now_s, merged=merged)
        late = any(each["overdue"] or not is_alive(each) for each in found)
        if late and (up_s := self.up_s()) < WORKER_SILENT_S:
            found = [each | {"redis_up_s": up_s} for each in found]
        return [each for each in found if queue is None or queue in queues_of(each)]

    def memory_for_batches(self, high_water: float) -> int | None:
        """Return the bytes of memory above which ENQUEUE refuses chunks; None without a limit."""
        limit = int(self._client.info("memory")["maxmemory"])
        return int(limit * high_water) if limit else None

    def why_full(
        self, queue: str, coming: int, *, high_water: float, high_water_requests: int
    ) -> str:
        """Return the reason why ENQUEUE would refuse a chunk after `coming` more bytes, or ''."""
        memory = self._client.info("memory")
        used, limit = memory["used_memory"], memory["maxmemory"]
        if limit:
            full = used + coming > limit * high_water
            return f"Redis uses {used} of {limit} bytes" if full else ""
        waiting = int(self._client.hget(naming.turns_key(queue), "waiting") or 0)
        return f"{waiting} requests wait in the queue" if waiting >= high_water_requests else ""


def _texts(pairs: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in pairs}
