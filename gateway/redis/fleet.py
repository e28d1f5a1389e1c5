"""What an operator watches of a fleet, and what its queues hold, for whoever decides how many
workers they get; read from Redis at one moment."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from contract import naming
from contract.redis import keys
from contract.redis.announcements import is_alive, read_announcements
from contract.redis.reads import Reads
from contract.redis.waiting import Waiting, WaitingReads

#: Batches whose queues are asked for at a time.
MOST_BATCHES = 10_000
#: The oldest batches, whose results are looked at: do they expire?
OLDEST_BATCHES = 1000


@dataclass(frozen=True, slots=True)
class Fleet:
    """Times are seconds, sizes bytes.

    `models` has what the workers of a queue serve, `tokens` what waits and runs in it.
    `uncollected` is how many results of the oldest batches nobody has collected, `expire_s` in how
    long the first of them expire (infinite: none does). `oldest_s` is the age of the oldest batch
    that waits, by queue; `overdue_s` how long ago the first lease ended that nobody has put back;
    `memory_limit` is 0 where Redis has none.
    """

    workers: list[dict[str, Any]]
    waiting: list[Waiting]
    oldest_s: dict[str, float]
    suspects: dict[str, int]
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
    tokens: dict[str, int] = field(default_factory=dict)
    models: dict[str, str] = field(default_factory=dict)


#: Tokens that a request is taken for as long as none of its queue has ended.
UNKNOWN_TOKENS = 256.0


class Scale(Struct, frozen=True):
    """What a queue holds, as autoscalers are told: requests `waiting` in its lists, suspects
    included, and `in_flight`, leased; both together in `tokens`.

    A request is counted as `mean_tokens`: what those of the queue cost lately, prompt and answer;
    as one token at least. The mean is 0 where a server reports no usage, and no queue that has work
    may be told as 0: its last workers would be stopped.
    `workers` serve the queue now, with `slots` requests at once.
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
    """Loads of one Redis. Each call raises StoreUnavailable where it cannot be used."""

    def load(self, queue: str) -> Scale:
        """Return what a queue holds now, all zeros for one that nobody has used."""
        return self.loads([queue])[queue]

    def loads(self, queues: Iterable[str]) -> dict[str, Scale]:
        """Return the same of several queues, by their names: one round trip."""
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
) -> Scale:
    # Those of a fleet that was killed stay until one of its successors sweeps them: so they call
    # for one.
    in_flight = max(0, sum(int(n) for k, n in counters.items() if k.startswith(b"in_flight:")))
    waiting = max(0, int(counters.get(b"waiting", 0))) + sum(lengths)
    mean_tokens = float(counters.get(b"mean", UNKNOWN_TOKENS))
    return Scale(
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
    """Reads of one Redis. Each raises StoreUnavailable where it cannot be used."""

    def fleet(self, queues: Iterable[str]) -> Fleet:
        """Return what there is in these queues, and in those that workers serve."""
        workers = [worker for worker in self.announcements() if is_alive(worker)]
        names = sorted({*queues, *(worker["queue"] for worker in workers)})
        pipe = self._client.pipeline(transaction=False)
        pipe.zcard(keys.LEASES)
        # Those below 0 are on their way back to a queue.
        pipe.zrangebyscore(keys.LEASES, 0, "+inf", start=0, num=1, withscores=True)
        pipe.hlen(keys.DEAD).zcard(keys.BATCHES).info()
        leases, first, dead, batches, info = pipe.execute()
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
            tokens={queue: load.tokens for queue, load in self.loads(names).items()},
            models={worker["queue"]: str(name) for worker in workers
                    if (name := worker.get("served") or worker.get("model"))},
        )  # fmt: skip

    def queues_of_batches(self, since_ms: float = 0) -> tuple[set[str], float]:
        """Return the queues of batches that were created since then, of the newest MOST_BATCHES,
        and when the newest was: ask for those since then the next time."""
        newest = self._client.zrange(
            keys.BATCHES, "+inf", since_ms, desc=True, byscore=True, offset=0, num=MOST_BATCHES,
            withscores=True,
        )  # fmt: skip
        names = [keys.batch_key(name.decode()) for name, _ in newest]
        queues = {raw.decode() for raw in self._each("hget", names, "queue") if raw}
        return queues, newest[0][1] if newest else since_ms

    def _uncollected(self) -> tuple[int, float]:
        """Return how many results of the OLDEST_BATCHES nobody has read since their batch ended,
        and in how many seconds the first of them expire."""
        pipe = self._client.pipeline(transaction=False)
        for name in self._client.zrange(keys.BATCHES, 0, OLDEST_BATCHES - 1):
            key = keys.batch_key(name.decode())
            pipe.hmget(key, "finished_at", "collected_at", "completed", "failed").pttl(key)
        replies = pipe.execute()
        count, first_ms = 0, math.inf
        for told, left_ms in zip(replies[::2], replies[1::2], strict=True):
            finished, collected, completed, failed = (int(raw or 0) for raw in told)
            # One that was retried after it was collected has ended again since.
            if finished > collected and completed + failed:
                count += completed + failed
                first_ms = min(first_ms, left_ms if left_ms >= 0 else math.inf)
        return count, first_ms / 1000
