"""What a campaign did and found, and what must not be among it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Report:
    """What a campaign did and found."""

    seed: int
    engine: str
    requests: int = 0
    large_requests: int = 0
    batches: int = 0
    #: Requests that fail whatever happens, lines that were cancelled, and tenants that came late.
    failing: int = 0
    cancelled: int = 0
    late_tenants: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    #: Whether Redis's clock could be set wrong; that takes a C compiler.
    clock_steps: bool = False
    computations: int = 0
    computed_again: int = 0
    deliveries: int = 0
    commits: int = 0
    poisons: int = 0
    engine_deaths: int = 0
    #: Requests that were blamed for deaths that others had caused. The campaign kills no engine a
    #: second time while the same request is alone in it: from within, that is what a poison does.
    blamed_innocents: int = 0
    #: Workers that lost leases although nobody had paused them.
    robbed: int = 0
    #: What the observer of the turns has objected to (fairness.py).
    unfair: int = 0
    #: Waits for progress, or for a worker to end, that were given up.
    hangs: int = 0
    lost: int = 0
    committed_twice: int = 0
    #: Keys and entries of Redis that nobody owns and that have no end.
    orphan_keys: int = 0
    seconds: float = 0

    def text(self) -> str:
        """Return it as JSON for people."""
        return json.dumps(vars(self) | {"faults": dict(sorted(self.faults.items()))}, indent=2)

    def broken(self) -> dict[str, int]:
        """Return what must be 0 and is not."""
        promises = (
            "blamed_innocents", "robbed", "unfair", "hangs", "lost", "committed_twice",
            "orphan_keys", "by_wrong_model", "claims_left",
        )  # fmt: skip
        return {name: found for name in promises if (found := getattr(self, name, 0))}


@dataclass
class SwapReport(Report):
    """The same of workers with several models; a fault is done in a phase of a swap."""

    #: How many faults were done in each phase, and how many swaps all workers began.
    phases: Counter[str] = field(default_factory=Counter)
    swaps: int = 0
    #: Answers that name another model than the one that was asked.
    by_wrong_model: int = 0
    #: Claims of workers that stopped in order.
    claims_left: int = 0
