"""Whether a file's requests are queued in its own order, or with equal beginnings together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from contract.redis.batches import BatchStore
from producer.submit.order.plan import UNKNOWN_CACHE_TOKENS, Plan, plan
from producer.submit.order.records import Records
from producer.submit.submission import Wish

#: `auto` leaves a file as it is for less than this share of its prompt tokens.
LEAST_GAIN = 0.02
_INPUT, _PREFIX = "input", "prefix"


@dataclass(frozen=True, slots=True)
class Choice:
    """`order` has the numbers of the requests, the first to be queued first; None for the file's
    own. `name` is what the batch keeps of it; an interrupted submit goes on by the same one."""

    name: str
    order: np.ndarray | None
    plan: Plan

    @property
    def in_groups(self) -> bool:
        """Whether it is another order than the file's."""
        return self.order is not None


def cache_tokens(store: BatchStore, queue: str) -> int:
    """Return how many tokens the smallest prefix cache of the queue's workers holds, 0 if they
    have none; UNKNOWN_CACHE_TOKENS where no worker tells."""
    return _smallest(store.workers(queue))


def _smallest(workers: Sequence[dict[str, Any]]) -> int:
    told = [w for w in workers if w.get("prefix_caching") is not None or w.get("kv_tokens")]
    caching = [w for w in told if w.get("prefix_caching") is not False]
    if told and not caching:
        return 0
    sizes = [w["kv_tokens"] for w in caching if isinstance(w.get("kv_tokens"), int)]
    return min(sizes, default=UNKNOWN_CACHE_TOKENS)


def choose(wish: Wish, records: Records, cache: int, earlier: str = "") -> Choice:
    """Decide on an order; `earlier` is the name of the choice by which some messages are queued.

    `cache` is in tokens; 0 says that workers have no prefix cache, and nothing is gained.
    """
    found = plan(records, cache)
    wanted = wish == _PREFIX or (cache > 0 and found.gain >= LEAST_GAIN)
    if earlier:
        wanted = earlier != _INPUT
    if not wanted:
        return Choice(_INPUT, None, found)
    return Choice(f"{_PREFIX} {found.fingerprint}", found.order, found)
