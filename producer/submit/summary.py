"""What a submit tells of its progress and its end."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from contract.batch import Batch

if TYPE_CHECKING:  # it loads numpy, which takes 0.1 s
    from producer.submit.order.choice import Choice


@dataclass(slots=True)
class Summary:
    """What one submit did. `found` requests were there before it, `queued` were not;
    `without_limit` of those have no max_tokens; `ignored` counts those with each field that means
    nothing here. `lines` of the file were read, with requests of `size` bytes; `waiting` says what
    for, while Redis is full. Of a planned batch `pushed` messages are in the queue, in the order
    `choice`."""

    batch: Batch
    lines: int = 0
    size: int = 0
    found: int = 0
    queued: int = 0
    rejected: int = 0
    without_limit: int = 0
    ignored: Counter[str] = field(default_factory=Counter)
    first_error: str = ""
    waiting: str = ""
    pushed: int = 0
    choice: Choice | None = None
