"""What a campaign against gateways did and found, and what must not be among it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field

#: A dead gateway's work must be in other hands within so long, in seconds.
TAKEOVER_S = 10.0


@dataclass
class GatewayReport:
    """What a campaign did and found; times are in seconds."""

    seed: int
    batches: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    online: int = 0
    #: SIGKILLs by what was killed.
    kills: Counter[str] = field(default_factory=Counter)
    #: How many of them fell in each phase; a process may be in several, or in none.
    phases: Counter[str] = field(default_factory=Counter)
    #: Resets of the gateways' connections to Redis by kind.
    resets: Counter[str] = field(default_factory=Counter)
    #: Work that another process took from a dead one, by kind, and the longest time that took.
    takeovers: Counter[str] = field(default_factory=Counter)
    takeover_s: dict[str, float] = field(default_factory=dict)
    slow_takeovers: int = 0
    #: Work taken from a process although neither it nor Redis had been killed, nor the reply lost
    #: that gave it the work.
    robbed: int = 0
    #: What clients were told before they asked again.
    told_meanwhile: Counter[str] = field(default_factory=Counter)
    deliveries: int = 0
    delivered_again: int = 0
    lost: int = 0
    doubled: int = 0
    wrong: int = 0
    #: Batches or files that a client's retry has made once more.
    made_twice: int = 0
    ended_twice: int = 0
    computed_twice: int = 0
    committed_twice: int = 0
    half_files: int = 0
    undelivered: int = 0
    orphan_keys: int = 0
    #: Errors that nobody expected, in the gateways' logs.
    tracebacks: int = 0
    seconds: float = 0

    def text(self) -> str:
        """Return it as JSON for people."""
        sorted_ = {
            name: dict(sorted(value.items())) if isinstance(value, Counter) else value
            for name, value in vars(self).items()
        }
        return json.dumps(sorted_, indent=2)

    def broken(self) -> dict[str, int]:
        """Return what must be 0 and is not."""
        promises = (
            "slow_takeovers", "robbed", "lost", "doubled", "wrong", "made_twice", "ended_twice",
            "computed_twice", "committed_twice", "half_files", "undelivered", "orphan_keys",
            "tracebacks",
        )  # fmt: skip
        return {name: getattr(self, name) for name in promises if getattr(self, name)}
