"""Reads what waits for each model, and claims the queue of a model that a worker will load.

A claim fails if another worker has claimed the queue since the read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from contract import naming
from contract.redis import keys
from contract.redis.announcements import WORKER_SILENT_S, is_alive, read_announcements
from contract.redis.reads import Reads
from worker.models.policy import Demand

#: Milliseconds for which Redis keeps the time at which a worker last stopped serving a queue. The
#: wait of a batch counts from then, or from the batch's creation if that is later.
LEFT_MS = 86_400_000
#: Assumed tokens of a request until a request of its queue has ended.
UNKNOWN_TOKENS = 256.0
#: Most batches of one queue whose creation and deadline are read, and most tenants of a priority.
MOST_LISTS, MOST_TENANTS = 100, 20


@dataclass(frozen=True, slots=True)
class Backlog:
    """The work that waits for each model, and the number of claims on each model's queue."""

    demands: dict[str, Demand]
    claims: dict[str, int]


class BacklogReads(Reads):
    """Reads and claims in one Redis. Calls block, and raise StoreUnavailable.

    A value in Redis that is not a number counts as missing.
    """

    def __init__(self, client: Any) -> None:
        super().__init__(client)
        #: When requests without a batch were first seen to wait, by queue: online requests, and
        #: those at any priority. Their messages have no time.
        self._online_since: dict[str, float] = {}
        self._plain_since: dict[str, float] = {}

    def backlog(
        self, queues: Mapping[str, str], worker: str, rates: Mapping[str, float]
    ) -> Backlog:
        """Return the work that waits, by model; `queues` has each model's queue.

        `rates` are the measured tokens per second of models, for deadlines.
        """
        pipe = self._client.pipeline(transaction=False)
        pipe.hgetall(keys.WORKERS).time().hgetall(keys.SWAP_CLAIMS).hgetall(keys.SWAP_LEFT)
        for queue in queues.values():
            pipe.hmget(naming.turns_key(queue), "waiting", "mean")
            for name in (*naming.priority_lists(queue), keys.suspects_list(queue)):
                pipe.llen(name)
        raw, (seconds, micros), claims, left, *replies = pipe.execute()
        now_s = int(seconds) + int(micros) / 1e6
        slots, counts = _slots_of_other_workers(raw, claims, now_s, worker)
        width = 2 + len(naming.PRIORITY_STEPS)
        demands = {}
        for n, (model, queue) in enumerate(queues.items()):
            (waiting, mean), *lengths = replies[n * width : (n + 1) * width]
            requests = int(max(0.0, _number(waiting))) + sum(lengths)
            times = self._times(queue, any(lengths[:-1]), now_s) if requests else _Times()
            requests = max(0, requests - times.ended)
            tokens = requests * max(1.0, _number(mean, UNKNOWN_TOKENS))
            left_s = _number(left.get(queue.encode())) / 1000
            rate = rates.get(model, 0.0)
            demands[model] = Demand(
                requests,
                tokens,
                times.oldest_s(now_s, left_s),
                None if times.online_since is None else now_s - times.online_since,
                times.due - now_s - (tokens / rate if rate else 0.0),
                slots.get(queue, 0),
            )
            if not requests:
                self._online_since.pop(queue, None)
                self._plain_since.pop(queue, None)
        return Backlog(demands, {m: counts.get(q, 0) for m, q in queues.items()})

    def _times(self, queue: str, in_kombus_lists: bool, now_s: float) -> _Times:
        """Return the times of a queue's waiting requests; reads at most MOST_LISTS batches."""
        # Keys of lists end with \x06 and the batch's name, which is '' for requests without one.
        lists = [(step, key) for step, tenant, key in self.turns(queue, MOST_TENANTS) if tenant]
        plain = [step for step, key in lists if key.endswith("\x06")]
        names = sorted({key.rpartition("\x06")[2] for _, key in lists} - {""})[:MOST_LISTS]
        hashes = [keys.batch_key(name) for name in names]
        fields = self._each("hmget", hashes, "created_at", "deadline", "cancelling", "finished_at")
        ended = {f"\x06{name}" for name, one in zip(names, fields, strict=True) if any(one[2:])}
        gone = [key for _, key in lists if key[key.rfind("\x06") :] in ended]
        fields = [one for one in fields if not any(one[2:])]
        created = [made for made in (_number(one[0]) / 1000 for one in fields) if made]
        due = [at for at in (_number(one[1]) / 1000 for one in fields) if at]
        return _Times(
            min(created, default=None),
            _since(self._plain_since, queue, bool(plain) or in_kombus_lists, now_s),
            _since(self._online_since, queue, 0 in plain, now_s),
            min(due, default=math.inf),
            sum(self._each("llen", gone)),
        )

    def claim(self, queue: str, worker: str, slots: int, life_s: float, seen: int) -> bool:
        """Claim a queue to load its model, unless its number of claims is no longer `seen`.

        `seen` is the number of claims in the backlog that led to this swap.
        """
        return bool(self._run("swap_claim", queue, worker, slots, int(life_s * 1000), seen))

    def end_claim(self, queue: str, worker: str) -> None:
        """Remove a claim: the worker serves the queue, or will not serve it."""
        self._client.hdel(keys.SWAP_CLAIMS, f"{queue}\0{worker}")

    def leave(self, worker: str) -> None:
        """Remove a worker's announcement."""
        self._client.hdel(keys.WORKERS, worker)

    def note_left(self, queues: Iterable[str]) -> None:
        """Note that a worker has now stopped serving these queues."""
        pipe = self._client.pipeline()
        pipe.hset(keys.SWAP_LEFT, mapping=dict.fromkeys(queues, self.now_ms()))
        pipe.pexpire(keys.SWAP_LEFT, LEFT_MS).execute()


class _Times(NamedTuple):
    """Times of a queue's waiting requests, in seconds since 1970; None without such requests.

    `batch_since` is the creation of the oldest batch, `due` the earliest deadline. `ended` counts
    the messages of cancelled and finished batches: they wait to be dropped, and need no model.
    """

    batch_since: float | None = None
    plain_since: float | None = None
    online_since: float | None = None
    due: float = math.inf
    ended: int = 0

    def oldest_s(self, now_s: float, left_s: float) -> float:
        """Return the age of the oldest request; for a batch, since a worker last left the queue."""
        since = [] if self.batch_since is None else [max(self.batch_since, left_s)]
        since += [] if self.plain_since is None else [self.plain_since]
        return max(0.0, now_s - min(since, default=now_s))


def _since(known: dict[str, float], queue: str, waits: bool, now_s: float) -> float | None:
    """Return the time of the first call since which requests wait; None if they do not."""
    if not waits:
        known.pop(queue, None)
        return None
    return known.setdefault(queue, now_s)


def _number(raw: object, default: float = 0.0) -> float:
    """Return a finite number from Redis's bytes or from JSON, else the default."""
    try:
        found = float(raw)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return default
    return found if math.isfinite(found) else default


def _slots_of_other_workers(
    raw: Mapping[bytes, bytes], claims: Mapping[bytes, bytes], now_s: float, worker: str
) -> tuple[dict[str, int], dict[str, int]]:
    """Return by queue the slots of other workers that serve or have claimed it, and its claims.

    A claim of a worker that does not announce itself gives no slots, as it died during its swap;
    a worker that starts claims its first queue before its first announcement.
    """
    alive: dict[str, Any] = {w["id"]: w for w in read_announcements(raw, now_s) if is_alive(w)}
    slots: dict[str, int] = {}
    counts: dict[str, int] = {}
    claimed: set[str] = set()
    for name, claim in claims.items():
        queue, _, claimer = name.decode(errors="replace").partition("\0")
        ends, claimed_slots, made = (*claim.split(b"\0"), b"", b"")[:3]
        if _number(ends) / 1000 <= now_s:
            continue
        counts[queue] = counts.get(queue, 0) + 1
        young = now_s - _number(made) / 1000 < WORKER_SILENT_S
        if claimer != worker and (claimer in alive or young):
            claimed.add(claimer)
            slots[queue] = slots.get(queue, 0) + int(_number(claimed_slots))
    for each in alive.values():
        if each["id"] != worker and each["id"] not in claimed:
            size = _number(each.get("slots")) or _number(each.get("limit")) or 1.0
            slots[each["queue"]] = slots.get(each["queue"], 0) + int(size)
    return slots, counts
