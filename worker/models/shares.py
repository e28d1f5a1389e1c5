"""Divides the workers among the tenants that wait in the queues of several models, by weight.

It uses no clock and no Redis. As in the turns of one queue (contract/lua/turns.lua) each tenant has
a counter: the tokens that it was served in all queues, divided by its weight. A tenant that begins
to wait gets the least counter of those that wait, or its earlier one if that is higher: its absence
gives neither credit nor penalty.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

#: By model and tenant, the tokens that wait.
Waiting = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Share:
    """The part of the workers that one model's waiting tenants have a right to.

    `weight` is the mean weight of the tokens that wait. `served` are the tokens that the least
    served tenant was served in all queues, divided by its part of the weights of all who wait, and
    `due` is the part of all slots that the weights give to this model.
    """

    weight: float = 1.0
    served: float = 0.0
    due: float = 0.0


class Shares:
    """The counters of the tenants that wait, as one worker sees them."""

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}
        self._waits: set[str] = set()

    @property
    def tenants(self) -> set[str]:
        """The tenants with a counter; empty unless two tenants have waited lately."""
        return set(self._counters)

    def look(
        self, waiting: Waiting, served: Mapping[str, float], weights: Mapping[str, float]
    ) -> dict[str, Share]:
        """Return each model's share; {} unless two tenants wait.

        `served` are the tokens of each tenant in all queues since the last look. A tenant that is
        not in `weights` has weight 1.
        """
        for tenant in self._counters:
            self._counters[tenant] += served.get(tenant, 0.0) / weights.get(tenant, 1.0)
        tokens: dict[str, float] = {}
        for each in waiting.values():
            for tenant, number in each.items():
                if number > 0:
                    tokens[tenant] = tokens.get(tenant, 0.0) + number
        self._enter(set(tokens))
        if len(tokens) < 2:
            return {}
        whole = sum(weights.get(tenant, 1.0) for tenant in tokens)
        parts = {tenant: weights.get(tenant, 1.0) / whole for tenant in tokens}
        return {
            model: self._share({t: n for t, n in each.items() if n > 0}, tokens, parts, whole)
            for model, each in waiting.items()
        }

    def _enter(self, tenants: set[str]) -> None:
        """Give counters to the tenants that begin to wait; forget those without a meaning."""
        known = [self._counters[tenant] for tenant in tenants & self._waits]
        least = min(known, default=0.0)
        for tenant in tenants - self._waits:
            self._counters[tenant] = max(least, self._counters.get(tenant, least))
        self._waits = tenants
        least = min((self._counters[tenant] for tenant in tenants), default=0.0)
        counters = {t: c - least for t, c in self._counters.items() if t in tenants or c > least}
        self._counters = counters if tenants and len(counters) > 1 else {}
        self._waits &= set(self._counters)

    def _share(
        self, own: Mapping[str, float], tokens: Mapping[str, float], parts: Mapping[str, float],
        whole: float,
    ) -> Share:  # fmt: skip
        """Return the share of the model for which these tenants' tokens wait."""
        if not own:
            return Share()
        return Share(
            whole * sum(parts[t] * n for t, n in own.items()) / sum(own.values()),
            whole * min(self._counters[tenant] for tenant in own),
            sum(parts[tenant] * (number / tokens[tenant]) for tenant, number in own.items()),
        )
