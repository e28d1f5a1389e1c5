"""Reads which tenants wait for which models, their weights, and the tokens they were served."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from contract.redis import keys
from contract.redis.reads import Reads
from worker.models.shares import Share, Shares

#: The tenant of the requests in kombu's lists.
CELERY = "celery"
#: Most lists of one queue whose lengths are read.
MOST_LISTS = 100


class TenantReads(Reads):
    """Reads the shares of models' queues in one Redis. Calls raise StoreUnavailable."""

    def __init__(self, client: Any) -> None:
        super().__init__(client)
        self._shares = Shares()
        #: By hour (since 1970) and tenant, the tokens in all queues at the last read.
        self._used: dict[tuple[int, str], float] = {}

    def shares(
        self,
        lists: Mapping[str, Sequence[tuple[str, str]]],
        queues: Mapping[str, str],
        means: Mapping[str, float],
        now_s: float,
    ) -> dict[str, Share]:
        """Return the share of each model; {} without a read unless two tenants wait.

        `lists` has by model the waiting lists, as pairs of tenant and key, `queues` the queue, and
        `means` the tokens of a request.
        """
        tenants = {tenant for each in lists.values() for tenant, _ in each} | self._shares.tenants
        if len(tenants) < 2:
            self._shares.look({}, {}, {})
            self._used = {}
            return {}
        waiting = {
            model: self._tokens(each[:MOST_LISTS], means[model]) for model, each in lists.items()
        }
        named = sorted(tenants)
        served = self._served(queues.values(), named, now_s)
        return self._shares.look(waiting, served, self._weights(named))

    def _tokens(self, lists: Sequence[tuple[str, str]], mean: float) -> dict[str, float]:
        """Return the waiting tokens of each tenant of a queue, an estimate."""
        found = Counter[str]()
        lengths = self._each("llen", [key for _, key in lists])
        for (tenant, _), length in zip(lists, lengths, strict=True):
            found[tenant] += length
        return {tenant: count * mean for tenant, count in found.items()}

    def _weights(self, tenants: Sequence[str]) -> dict[str, float]:
        stored = self._client.hmget(keys.TENANTS, tenants)
        return {t: _weight(raw) for t, raw in zip(tenants, stored, strict=True) if raw}

    def _served(
        self, queues: Iterable[str], tenants: Sequence[str], now_s: float
    ) -> dict[str, float]:
        """Return the tokens that tenants were served since the last call, if it named them."""
        hour = int(now_s // 3600)
        used: dict[tuple[int, str], float] = {}
        names = [(each, keys.used_key(q, each)) for each in (hour - 1, hour) for q in queues]
        replies = self._each("hmget", [name for _, name in names], tenants)
        for (each, _), reply in zip(names, replies, strict=True):
            for tenant, raw in zip(tenants, reply, strict=True):
                used[each, tenant] = used.get((each, tenant), 0.0) + _tokens_of(raw)
        before, self._used = self._used, used
        known = {tenant for _, tenant in before}
        served: dict[str, float] = {}
        for (each, tenant), tokens in used.items():
            if tenant in known:
                more = max(0.0, tokens - before.get((each, tenant), 0.0))
                served[tenant] = served.get(tenant, 0.0) + more
        return served


def _weight(raw: bytes) -> float:
    """Return the weight of a tenant's entry, 1 if it cannot be read."""
    try:
        weight = float(raw.partition(b"\0")[0])
    except ValueError:
        return 1.0
    return weight if math.isfinite(weight) and weight > 0 else 1.0


def _tokens_of(raw: bytes | None) -> float:
    try:
        tokens = float(raw or 0)
    except ValueError:
        return 0.0
    return tokens if math.isfinite(tokens) else 0.0
