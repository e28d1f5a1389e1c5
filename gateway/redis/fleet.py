"""Reads the state of all workers and queues, and queues' loads for autoscalers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from msgspec import Struct

from contract import naming
from contract.redis import keys
from contract.redis.announcements import is_alive, queues_of, read_announcements
from contract.redis.deadlines import DeadlineReads
from contract.redis.reads import Reads
from contract.redis.waiting import Waiting, WaitingReads

#: Most batches whose queues are read in one call, and oldest batches whose results are counted.
MOST_BATCHES, OLDEST_BATCHES = 10_000, 1000


@dataclass(frozen=True, slots=True)
class Fleet:
    """The state of all workers and queues; times in seconds, sizes in bytes.

    By queue: `models` has the model of its workers, `tokens` the tokens of waiting and running
    requests, `oldest_s` the age of the oldest waiting batch, `suspects` the number of suspects,
    `late` the number of batches that will miss their deadlines.
    By tenant: `reused` has the lines that known answers have answered.
    `uncollected` counts the uncollected results of the oldest batches.
    `expire_s`: seconds until the first of them expires, inf for never.
    `overdue_s`: seconds since the end of the oldest lease that was not swept.
    `memory_limit`: Redis's maxmemory, 0 if it has none.
    """

    workers: list[dict[str, Any]]
    waiting: list[Waiting]
    oldest_s: dict[str, float]
    suspects: dict[str, int]
    late: dict[str, int]
    dead_letters: int
    leases: int
    overdue_s: float
    batches: int
    memory_used: int
    memory_limit: int
    append_only: bool
    uncollected: int
    expire_s: float
    queues: list[str] = field(default_factory=list)
    reused: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    models: dict[str, str] = field(default_factory=dict)


#: Assumed tokens of a request until a request of its queue has ended.
UNKNOWN_TOKENS = 256.0


class QueueLoad(Struct, frozen=True):
    """The load of a queue, for autoscalers.

    `waiting` includes suspects. `mean_tokens` counts prompt and answer
    of recent requests; it is 0 if a server reports no usage. `tokens` counts at least one for each
    request: with 0 the last workers of a queue with work would be stopped. `workers` serve the
    queue now, with `slots` in total.
    """

    queue: str
    waiting: int
    in_flight: int
    requests: int
    mean_tokens: float
    tokens: int
    workers: int
    slots: int


class Loads(Reads):
    """Reads loads of queues in one Redis. Calls raise StoreUnavailable."""

    def load(self, queue: str) -> QueueLoad:
        """Return the load of a queue; an unknown queue has no requests and no workers."""
        return self.loads([queue])[queue]

    def loads(self, queues: Iterable[str]) -> dict[str, QueueLoad]:
        """Return the loads of queues by name, in one round trip."""
        names = list(queues)
        pipe = self._client.pipeline(transaction=False)
        pipe.hgetall(keys.WORKERS).time()
        for queue in names:
            pipe.hgetall(naming.turns_key(queue))
            for name in (*naming.priority_lists(queue), keys.suspects_list(queue)):
                pipe.llen(name)
        raw, (now_s, _), *replies = pipe.execute()
        alive = [each for each in read_announcements(raw, now_s) if is_alive(each)]
        width = 2 + len(naming.PRIORITY_STEPS)
        return {
            queue: _load(
                queue,
                replies[n * width],
                replies[n * width + 1 : (n + 1) * width],
                [each for each in alive if each["queue"] == queue],
            )
            for n, queue in enumerate(names)
        }


def _load(
    queue: str,
    counters: Mapping[bytes, bytes],
    lengths: Iterable[int],
    workers: Sequence[Mapping[str, Any]],
) -> QueueLoad:
    # Requests of killed workers count until a new worker sweeps them, so that an
    # autoscaler starts one.
    in_flight = max(0, sum(int(n) for k, n in counters.items() if k.startswith(b"in_flight:")))
    waiting = max(0, int(counters.get(b"waiting", 0))) + sum(lengths)
    mean_tokens = float(counters.get(b"mean", UNKNOWN_TOKENS))
    return QueueLoad(
        queue=queue,
        waiting=waiting,
        in_flight=in_flight,
        requests=waiting + in_flight,
        mean_tokens=mean_tokens,
        tokens=round((waiting + in_flight) * max(1.0, mean_tokens)),
        workers=len(workers),
        slots=sum(each.get("limit", 0) for each in workers),
    )


class FleetReads(WaitingReads, Loads):
    """Reads the state of all workers and queues in one Redis. Calls raise StoreUnavailable."""

    def fleet(self, queues: Iterable[str]) -> Fleet:
        """Return the state of these queues and of the queues that workers serve."""
        workers = [worker for worker in self.announcements() if is_alive(worker)]
        names = sorted({*queues, *(queue for worker in workers for queue in queues_of(worker))})
        pipe = self._client.pipeline(transaction=False)
        pipe.zcard(keys.LEASES)
        # Leases with a score below 0 are being returned to a queue.
        pipe.zrangebyscore(keys.LEASES, 0, "+inf", start=0, num=1, withscores=True)
        pipe.hlen(keys.DEAD).zcard(keys.BATCHES).hgetall(keys.REUSED).info()
        leases, first, dead, batches, reused, info = pipe.execute()
        now_s = self.now_ms() / 1000
        overdue_s = max(0.0, now_s - first[0][1] / 1000) if first else 0.0
        waiting = [one for queue in names for one in self.waiting_by(queue, most=None)]
        oldest_s = dict.fromkeys(names, 0.0)
        for one in waiting:
            if one.since_ms is not None:
                oldest_s[one.queue] = max(oldest_s[one.queue], now_s - one.since_ms / 1000)
        uncollected, expire_s = self._uncollected()
        counts = self._each("llen", [keys.suspects_list(queue) for queue in names])
        return Fleet(
            workers=workers,
            waiting=waiting,
            oldest_s=oldest_s,
            suspects=dict(zip(names, counts, strict=True)),
            late=self._late(names),
            dead_letters=dead,
            leases=leases,
            overdue_s=overdue_s,
            batches=batches,
            memory_used=int(info["used_memory"]),
            memory_limit=int(info.get("maxmemory", 0)),
            append_only=bool(info.get("aof_enabled")),
            uncollected=uncollected,
            expire_s=expire_s,
            queues=names,
            reused={tenant.decode(): int(lines) for tenant, lines in reused.items()},
            tokens={queue: load.tokens for queue, load in self.loads(names).items()},
            models={worker["queue"]: str(name) for worker in workers
                    if (name := worker.get("served") or worker.get("model"))},
        )  # fmt: skip

    def _late(self, queues: Sequence[str]) -> dict[str, int]:
        """Return for each queue how many batches will miss their deadlines."""
        marks = self._each("exists", [naming.deadlines_key(queue) for queue in queues])
        reads = DeadlineReads.using(self)
        return {
            queue: len(reads.deadline_order(queue).late) if marked else 0
            for queue, marked in zip(queues, marks, strict=True)
        }

    def queues_of_batches(self, since_ms: float = 0) -> tuple[set[str], float]:
        """Return the queues of the newest batches since a time, and the newest's time."""
        newest = self._client.zrange(
            keys.BATCHES, "+inf", since_ms, desc=True, byscore=True, offset=0, num=MOST_BATCHES,
            withscores=True,
        )  # fmt: skip
        names = [keys.batch_key(name.decode()) for name, _ in newest]
        fields = self._each("hmget", names, ["queue", "routes"])
        queues = {raw.decode() for raw, _ in fields if raw}
        queues |= {queue for _, raw in fields if raw for queue in orjson.loads(raw).values()}
        return queues, newest[0][1] if newest else since_ms

    def _uncollected(self) -> tuple[int, float]:
        """Return the number of uncollected results, and the seconds until the first expires."""
        pipe = self._client.pipeline(transaction=False)
        for name in self._client.zrange(keys.BATCHES, 0, OLDEST_BATCHES - 1):
            key = keys.batch_key(name.decode())
            pipe.hmget(key, "finished_at", "collected_at", "completed", "failed").pttl(key)
        replies = pipe.execute()
        count, first_ms = 0, math.inf
        for fields, left_ms in zip(replies[::2], replies[1::2], strict=True):
            finished, collected, completed, failed = (int(raw or 0) for raw in fields)
            # After a retry of a collected batch, `finished_at` is later than `collected_at`.
            if finished > collected and completed + failed:
                count += completed + failed
                first_ms = min(first_ms, left_ms if left_ms >= 0 else math.inf)
        return count, first_ms / 1000
