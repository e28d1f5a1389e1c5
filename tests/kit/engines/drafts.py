"""What vLLM's statistics say of speculation: how many tokens were drafted, how many accepted."""

from __future__ import annotations

import re
import time
from pathlib import Path

from demo.stack import eventually

_LINE = re.compile(r"SpecDecoding metrics: .*Accepted: (\d+) tokens, Drafted: (\d+) tokens")


def counted(text: str) -> dict[str, int]:
    """Return the sums over a log in which vLLM tells of each interval by itself."""
    found = [(int(accepted), int(drafted)) for accepted, drafted in _LINE.findall(text)]
    return {
        "drafted_tokens": sum(drafted for _, drafted in found),
        "accepted_tokens": sum(accepted for accepted, _ in found),
    }


def settled(log: Path, every_s: float) -> dict[str, int]:
    """Return the sums of an engine that has ended its requests and logs every so many seconds.

    The last interval is told up to `every_s` after its last token; three without news are waited.
    """
    last, since = counted(log.read_text(errors="replace")), time.monotonic()

    def still() -> bool:
        nonlocal last, since
        now = counted(log.read_text(errors="replace"))
        if now != last:
            last, since = now, time.monotonic()
        return time.monotonic() - since > 3 * every_s

    eventually(still, 60, f"{log.name} settles", every_s / 4)
    return last
