"""A simulated vLLM server whose times were measured on an H100 (one 8B model).

It has no clock and no sockets: each call of `second` lets one second pass. Its page is vLLM's, with
the histograms over all clients.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from statistics import median

#: Requests that run; time to the first token, p50 and p99; mean time between tokens: milliseconds.
MEASURED = [
    (0, 22.0, 52.0, 6.5), (64, 50.0, 92.0, 11.0), (192, 84.0, 127.0, 26.0),
    (256, 314.0, 688.0, 35.0), (320, 1205.0, 1539.0, 35.0), (10_000, 60_000.0, 70_000.0, 35.0),
]  # fmt: skip
#: Tokens of an answer to people, and of one of ours.
THEIRS, OURS = 64, 128


def measured(rows: float) -> tuple[float, ...]:
    """Return the measured row for this number of requests, between two rows by proportion."""
    place = max(1, bisect_left(MEASURED, (rows,)))
    low, high = MEASURED[place - 1], MEASURED[place]
    part = (rows - low[0]) / (high[0] - low[0])
    return tuple(a + part * (b - a) for a, b in zip(low, high, strict=True))


class HistogramServer:
    """A server with `slots`, to which people send `people_s` requests a second."""

    def __init__(self, people_s: float = 5.0, slots: int = 256, seed: int = 7) -> None:
        self.people_s, self.slots = people_s, slots
        self.random = random.Random(seed)
        self.people = self.own = 0
        self._ended = 0.0
        self._counts = dict.fromkeys(("gaps", "gaps_s", "tokens", "finished"), 0.0)

    @property
    def rows(self) -> int:
        """The requests in the server."""
        return self.people + self.own

    @property
    def first_token_p99_ms(self) -> float:
        """What people feel of the first token."""
        return measured(self.rows)[2]

    def second(self, own: int) -> int:
        """Let a second pass with this many requests of ours; return how many of them have ended."""
        self.own = own
        _, first_ms, _, between_ms = measured(self.rows)
        stay_s = (first_ms + THEIRS * between_ms) / 1000
        arrived = self.people + self.people_s  # at most so many are there after this second
        self.people = round(min(arrived, self.people_s * stay_s))
        running = min(self.slots, self.rows)
        between_s = measured(self.rows)[3] / 1000 * self.random.gauss(1, 0.05)
        self._ended += own / (OURS * between_s)
        ended, self._ended = int(self._ended), self._ended % 1
        tokens = running / between_s
        more = {"gaps": tokens, "gaps_s": float(running), "tokens": tokens,
                "finished": ended + self.people_s}  # fmt: skip
        for name, number in more.items():
            self._counts[name] += number
        return ended

    def probe_s(self, probes: int) -> float:
        """Return the median time of these probes."""
        _, middle, late, _ = measured(self.rows)
        spread = (late / middle - 1) / 2.33  # p99 is 2.33 deviations above the middle
        times = [middle * max(0.3, self.random.gauss(1, spread)) for _ in range(probes)]
        return median(times) / 1000

    def restart(self) -> None:
        """Begin all counters at 0 again."""
        self._counts = dict.fromkeys(self._counts, 0.0)

    def page(self) -> bytes:
        """Return its answer to GET /metrics."""
        running = min(self.slots, self.rows)
        values = {
            "num_requests_running": running, "num_requests_waiting": self.rows - running,
            "kv_cache_usage_perc": running / (2 * self.slots),
            "generation_tokens_total": self._counts["tokens"],
            "prompt_tokens_total": 4 * self._counts["tokens"],
            "inter_token_latency_seconds_sum": self._counts["gaps_s"],
            "inter_token_latency_seconds_count": self._counts["gaps"],
            'request_success_total{finished_reason="stop"}': self._counts["finished"],
        }  # fmt: skip
        return "".join(f"vllm:{name} {value}\n" for name, value in values.items()).encode()
