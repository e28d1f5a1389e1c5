"""How many requests may be in flight in a server: what its metrics say, and what follows.

The limit follows the server's own metrics so that a few requests wait there and no more: no slot
idles, no other client is pushed back.
"""

import re
from dataclasses import dataclass

#: Most requests in flight per server where no number is set.
CEILING = 256
#: KV cache use above which no more requests are added.
KV_FULL = 0.95
#: Share of its limit a server must be filled to before the limit may grow.
FILLED = 0.9

METRIC = re.compile(
    rb"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc|generation_tokens_total"
    rb"|prompt_tokens_total)(?:\{[^\n]*\})? (\d+(?:\.\d+)?(?:e[+-]?\d+)?)$",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Metrics:
    """What a vLLM server says of itself, all its clients and replicas together.

    `kv` is the fullest replica's share of its KV cache, `tokens` counts prompt and output
    tokens since the server's start.
    """

    running: float
    waiting: float
    kv: float
    tokens: float


def read_metrics(page: bytes) -> Metrics | None:
    """Read a Prometheus page; None if it is not vLLM's."""
    found: dict[bytes, list[float]] = {}
    for name, value in METRIC.findall(page):
        found.setdefault(name, []).append(float(value))
    if b"num_requests_running" not in found:
        return None
    total = {name: sum(values) for name, values in found.items()}
    return Metrics(
        total[b"num_requests_running"],
        total.get(b"num_requests_waiting", 0.0),
        max(found.get(b"kv_cache_usage_perc", [0.0])),
        total.get(b"generation_tokens_total", 0.0) + total.get(b"prompt_tokens_total", 0.0),
    )


def next_limit(limit: int, in_flight: int, metrics: Metrics | None, peak: float) -> int:
    """Return the limit for the next second; `peak` is the most that ran at once of late.

    Requests that began together end together. Others must wait there already, or slots stay empty
    for a round trip. `peak` stands for the number of slots: just after many ended together, few
    run and many wait. Without metrics the limit grows slowly, and only a rest lowers it.
    """
    if in_flight < FILLED * limit:
        return limit  # what waits there is not for want of a higher limit
    if metrics is None:
        return min(CEILING, limit + 4)
    excess = int(metrics.running + metrics.waiting - peak - waiting_room(peak))
    if excess > 0:
        return max(1, min(limit, in_flight) - excess)
    if metrics.waiting == 0 and metrics.kv < KV_FULL:
        return min(CEILING, limit + max(4, limit // 2))
    return limit


def waiting_room(peak: float) -> int:
    """Return how many requests may wait in a server that runs so many at once."""
    return min(64, max(8, int(peak) // 2))
