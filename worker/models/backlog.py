"""Reads what waits for each model, and claims the queue of a model that a worker will load.

A claim fails if another worker has claimed the queue since the read. Messages that need no model,
because their requests or batches are cancelled, have ended or are gone, are removed.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from contract import naming
from contract.redis import keys
from contract.redis.announcements import WORKER_SILENT_S, is_alive, read_announcements
from worker.drain.leases import POP_BYTES
from worker.models.policy import Demand
from worker.models.shares import Share
from worker.models.tenants import CELERY, TenantReads

#: Milliseconds for which Redis keeps the time at which a worker last stopped serving a queue. A
#: batch waits from that time, or from its creation if that is later.
LEFT_MS = 86_400_000
#: Assumed tokens of a request until a request of its queue has ended.
UNKNOWN_TOKENS = 256.0
#: Most batches of one queue whose creation and deadline are read, and most tenants of a priority.
MOST_LISTS, MOST_TENANTS = 100, 20
#: Seconds from a search that removed nothing until a list that is not of one batch is searched
#: again for messages of requests that have ended and of batches that are gone.
SEARCH_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class Backlog:
    """The work that waits for each model, and the number of claims on each model's queue."""

    demands: dict[str, Demand]
    claims: dict[str, int]


class BacklogReads(TenantReads):
    """Reads and claims in one Redis. Calls block, and raise StoreUnavailable.

    A value in Redis that is not a number counts as missing.
    """

    def __init__(self, client: Any, result_ttl_ms: int = 86_400_000) -> None:
        super().__init__(client)
        self._ttl_ms = result_ttl_ms
        #: By queue, the time (s since 1970) since which requests without a batch wait: online ones,
        #: and those at any priority. Their messages have no time, so this object notes it.
        self._online_since: dict[str, float] = {}
        self._plain_since: dict[str, float] = {}
        #: By queue, the same time for requests in lists whose name is no batch's.
        self._shared_since: dict[str, float] = {}
        #: By such a list, the time (s since 1970) of the latest search that removed nothing.
        self._searched: dict[str, float] = {}

    def backlog(
        self, queues: Mapping[str, str], worker: str, rates: Mapping[str, float]
    ) -> Backlog:
        """Return the work that waits for each model; `queues` maps models to their queues.

        `rates` maps models to their measured tokens per second, from which `slack_s` is computed.
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
        demands, lists, means = {}, {}, {}
        for n, (model, queue) in enumerate(queues.items()):
            (waiting, mean), *lengths = replies[n * width : (n + 1) * width]
            requests = int(max(0.0, _number(waiting))) + sum(lengths)
            named = (*naming.priority_lists(queue), keys.suspects_list(queue))
            batchless = [key for key, length in zip(named, lengths, strict=True) if length]
            times = self._times(queue, worker, batchless, now_s) if requests else _Times()
            requests = max(0, requests - times.ended)
            means[model] = max(1.0, _number(mean, UNKNOWN_TOKENS))
            tokens, lists[model] = requests * means[model], times.lists
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
                for since in (self._online_since, self._plain_since, self._shared_since):
                    since.pop(queue, None)
        shares = self.shares(lists, queues, means, now_s)
        return Backlog(
            {model: _with_share(each, shares.get(model)) for model, each in demands.items()},
            {m: counts.get(q, 0) for m, q in queues.items()},
        )

    def _times(self, queue: str, worker: str, batchless: list[str], now_s: float) -> _Times:
        """Return the times of a queue's waiting requests; reads at most MOST_LISTS batches.

        `batchless` are kombu's lists and the list of suspects, of those that have messages.
        """
        kombus = naming.priority_lists(queue)
        turns = self.turns(queue, MOST_TENANTS)
        lists = [(step, key) for step, tenant, key in turns if tenant and key not in kombus]
        by_tenant = [(tenant, key) for _, tenant, key in turns if tenant and key not in kombus]
        by_tenant += [(CELERY, key) for key in kombus if key in batchless]
        # Keys of lists end with \x06 and the batch's name, which is '' for requests without one and
        # for batches in order of arrival (--turn fifo).
        plain = {key: step for step, key in lists if key.endswith("\x06")}
        names = sorted({key.rpartition("\x06")[2] for _, key in lists} - {""})[:MOST_LISTS]
        hashes = [keys.batch_key(name) for name in names]
        wanted = ("created_at", "deadline", "cancelling", "finished_at")
        fields = dict(zip(names, self._each("hmget", hashes, *wanted), strict=True))
        named = [(key, fields.get(key.rpartition("\x06")[2])) for _, key in lists]
        ended = [key for key, one in named if one and any(one[2:])]
        # A deleted batch's list, or that of a run, whose windows share a list of the run's name.
        shared = [key for key, one in named if one and not any(one)]
        mixed = [*shared, *plain, *batchless]
        removed = self._remove_ended(queue, worker, ended, mixed, now_s)
        left = [key for key in mixed if key not in removed.emptied]
        living = [one for one in fields.values() if not any(one[2:])]
        created = [made for made in (_number(one[0]) / 1000 for one in living) if made]
        since = _since(self._shared_since, queue, not set(shared).isdisjoint(left), now_s)
        created += [] if since is None else [since]
        due = [at for at in (_number(one[1]) / 1000 for one in living) if at]
        return _Times(
            min(created, default=None),
            _since(self._plain_since, queue, not set(left) <= set(shared), now_s),
            _since(self._online_since, queue, any(plain.get(key) == 0 for key in left), now_s),
            min(due, default=math.inf),
            removed.messages,
            [one for one in by_tenant if one[1] not in {*ended, *removed.emptied}],
        )

    def _remove_ended(
        self, queue: str, worker: str, ended: list[str], mixed: list[str], now_s: float
    ) -> _Removed:
        """Remove messages of ended requests and gone batches; count those that were there before.

        In the lists `ended` all messages are such ones, in the lists `mixed` some may be.
        """
        recent = {k: at for k, at in self._searched.items() if now_s - at < SEARCH_EVERY_S}
        searched = [key for key in mixed if key not in recent]
        if not (lists := searched + ended):
            return _Removed()
        before = self._each("llen", lists)
        self.remove_ended(queue, worker, lists)
        after = self._each("llen", searched)
        same = [key for key, was, now in zip(searched, before, after, strict=False) if was == now]
        self._searched = recent | dict.fromkeys(same, now_s)
        emptied = frozenset(key for key, now in zip(searched, after, strict=True) if not now)
        return _Removed(max(0, sum(before) - sum(after)), emptied)

    def remove_ended(self, queue: str, worker: str, lists: Sequence[str]) -> None:
        """Remove the messages before the first one that may run, from each of a queue's lists.

        POP ends these requests as it does for a worker that serves the queue; one call removes at
        most 1,000 messages. Otherwise they would stay until a worker loads the queue's model.
        """
        date = dt.datetime.now(dt.UTC).isoformat()
        no_lease = (0, 1, self._ttl_ms, date, 0, "", 0, 0, 0, "")
        self._run("pop", worker, queue, 0, POP_BYTES, *no_lease, *lists)

    def claim(self, queue: str, worker: str, slots: int, life_s: float, seen: int) -> bool:
        """Claim a queue to load its model; return False if its number of claims is not `seen`.

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
    the removed messages, which need no model. `lists` are tenants and keys of the waiting lists.
    """

    batch_since: float | None = None
    plain_since: float | None = None
    online_since: float | None = None
    due: float = math.inf
    ended: int = 0
    lists: Sequence[tuple[str, str]] = ()

    def oldest_s(self, now_s: float, left_s: float) -> float:
        """Return the age of the oldest request; for a batch, since a worker last left the queue."""
        since = [] if self.batch_since is None else [max(self.batch_since, left_s)]
        since += [] if self.plain_since is None else [self.plain_since]
        return max(0.0, now_s - min(since, default=now_s))


class _Removed(NamedTuple):
    """The number of messages that need no model, and the lists that are empty without them."""

    messages: int = 0
    emptied: frozenset[str] = frozenset()


def _with_share(demand: Demand, share: Share | None) -> Demand:
    if share is None:
        return demand
    return replace(demand, weight=share.weight, served=share.served, due=share.due)


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

    The claim of a worker that does not announce itself gives no slots, because the worker died
    during its swap. A young claim does: a worker that starts claims its first queue before its
    first announcement.
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
