"""The metrics of a vLLM server, and the limit of requests in flight that follows from them."""

import math
import re
from collections import defaultdict, deque
from dataclasses import dataclass

#: Highest limit of requests in flight for each server.
CEILING = 256
#: Used part of the KV cache above which the limit does not grow.
KV_FULL = 0.95
#: Part of the limit that must be in flight before the limit may grow.
FILLED = 0.9

#: Matches the lines of an answer to GET /metrics that `Metrics` needs: name, labels, value.
METRIC = re.compile(
    rb"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc|generation_tokens_total"
    rb"|prompt_tokens_total|inter_token_latency_seconds_(?:sum|count)|request_success_total)"
    rb"(\{[^\n]*\})? (\S+)$",
    re.MULTILINE,
)
#: Labels of requests that were not answered to the end.
UNFINISHED = re.compile(rb'finished_reason="(abort|error)"')


@dataclass(frozen=True, slots=True)
class Metrics:
    """The metrics of a vLLM server: sums over its replicas and all its clients.

    `kv` is the used part of the KV cache, of the replica that uses most. Since the server's start:
    `tokens` of prompts and outputs, `finished` requests, and the number and the seconds of the
    `gaps` between the tokens of an answer.
    """

    running: float
    waiting: float
    kv: float
    tokens: float
    finished: float = 0.0
    gaps: float = 0.0
    gaps_s: float = 0.0


def read_metrics(answer: bytes) -> Metrics | None:
    """Read an answer to GET /metrics, in Prometheus's format.

    None: it is not vLLM's, or a value is not a number (NaN, for example) or is negative.
    """
    values: dict[bytes, list[float]] = {}
    for name, labels, text in METRIC.findall(answer):
        if (value := _amount(text)) is None:
            return None
        if not UNFINISHED.search(labels):
            values.setdefault(name, []).append(value)
    if b"num_requests_running" not in values:
        return None
    total = defaultdict(float, {name: sum(listed) for name, listed in values.items()})
    return Metrics(
        total[b"num_requests_running"],
        total[b"num_requests_waiting"],
        max(values.get(b"kv_cache_usage_perc", [0.0])),
        total[b"generation_tokens_total"] + total[b"prompt_tokens_total"],
        total[b"request_success_total"],
        total[b"inter_token_latency_seconds_count"],
        total[b"inter_token_latency_seconds_sum"],
    )


def _amount(text: bytes) -> float | None:
    """Return a finite number of at least 0; None for any other text."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None


def next_limit(limit: int, in_flight: int, metrics: Metrics | None, peak: float) -> int:
    """Return the limit for the next second. `peak` is the most requests that ran recently.

    Requests that begin at the same time end at the same time. If no further requests wait at the
    server at that moment, its slots are empty for a round trip. `peak` stands for the number of
    slots, because the running requests do not show it: just after many requests have ended, few run
    and many wait. Without metrics the limit grows slowly, and only a rest lowers it.
    """
    if in_flight < FILLED * limit:
        return limit  # a higher limit would not send more
    if metrics is None:
        return min(CEILING, limit + 4)
    excess = int(metrics.running + metrics.waiting - peak - allowed_to_wait(peak))
    if excess > 0:
        return max(1, min(limit, in_flight) - excess)
    if metrics.waiting == 0 and metrics.kv < KV_FULL:
        return min(CEILING, limit + max(4, limit // 2))
    return limit


def allowed_to_wait(peak: float) -> int:
    """Return how many requests may wait at a server that runs `peak` requests at once."""
    return min(64, max(8, int(peak) // 2))


# -- what one second shows ---------------------------------------------------------------

#: Seconds for which metrics are not used after a counter has gone back: the server has started
#: again, or several servers behind one address answer in turn.
DISTRUST_S = 60
#: Seconds after which metrics count as stale, if counters stand still although answers come.
FROZEN_S = 3
#: Seconds by which the server's count of finished requests may be ahead of the worker's.
AHEAD_S = 5
#: Seconds for which a rise of other clients' finished requests counts.
RISE_S = 60
#: Seconds of our finished requests by which the server's count may vary: it is read a little before
#: ours. Answers of ours that are on the way are among those in flight that the server does not
#: show; they count for at most so many seconds.
IN_TRANSIT_S, MOST_IN_TRANSIT_S = 0.1, 0.5
#: Seconds of our finished requests that are compared with the server's count, and the fewest
#: requests for a comparison.
COMPARED_S, COMPARED = 10, 8
#: Fewest requests of ours in flight for a comparison with those that the server shows.
SEEN = 4


@dataclass(frozen=True, slots=True)
class Second:
    """What one second shows: mean seconds between tokens, waiting requests, other clients' use.

    `present` is the number of requests in the server, those of all clients.
    """

    itl_s: float | None = None
    waiting: int | None = None
    other_clients: bool | None = None
    present: int | None = None


class Seconds:
    """Compares metrics with those of a second before. Metrics that cannot be true show nothing."""

    def __init__(self) -> None:
        self._before: Metrics | None = None
        self._finished = 0
        self._distrusted = self._frozen = self._unseen = 0
        #: The latest counts of other clients' finished requests; a count may be a little too high.
        self._counts: deque[float] = deque(maxlen=AHEAD_S)
        self._fewest: deque[float] = deque(maxlen=RISE_S)
        #: Our requests in flight that the server did not show at the latest looks, and the most of
        #: ours at the look before.
        self._hidden: deque[int] = deque(maxlen=AHEAD_S)
        self._own = 0
        #: The server's latest counts of finished requests, each with that of ours.
        self._pairs: deque[tuple[float, int]] = deque(maxlen=AHEAD_S + COMPARED_S + 1)

    def next(self, metrics: Metrics | None, own: int, finished: int) -> Second:
        """Return what the last second shows.

        `own` is the most requests of ours that may be in the server; `finished` counts all that the
        server has answered.
        """
        answered, self._finished = finished > self._finished, finished
        # The server shows what ran during its latest step: some of it has ended since.
        most, self._own = max(own, self._own), own
        if metrics is None:
            return Second()
        before, self._before = self._before, metrics
        self._distrusted = max(0, self._distrusted - 1)
        if before is not None and _goes_back(before, metrics):
            self._distrusted = DISTRUST_S
            self._counts.clear()
            self._hidden.clear()
            self._pairs.clear()
            self._fewest.clear()
        unchanged = before is not None and before.tokens == metrics.tokens
        self._frozen = (self._frozen + answered) if unchanged else 0
        if before is None or self._distrusted or self._frozen >= FROZEN_S:
            return Second()
        gaps, gaps_s = metrics.gaps - before.gaps, metrics.gaps_s - before.gaps_s
        itl_s = gaps_s / gaps if gaps > 0 and gaps_s > 0 else None
        present = int(metrics.running + metrics.waiting)
        unseen = own >= SEEN and present < own / 2
        self._unseen = self._unseen + 1 if unseen else 0
        self._hidden.append(max(0, own - present))
        more_finished = self._more_finished(metrics, finished)
        if self._unseen >= FROZEN_S or self._misses_ours():
            return Second(itl_s)  # it may not show other clients' requests, either
        return Second(itl_s, int(metrics.waiting), present > most or more_finished, present)

    def _misses_ours(self) -> bool:
        """Whether the server's count of finished requests leaves most of ours out."""
        if len(self._pairs) < AHEAD_S + COMPARED_S + 1:
            return False
        (latest, ours), (oldest, _) = self._pairs[-1], self._pairs[0]
        ours -= self._pairs[AHEAD_S][1]
        return ours >= COMPARED and latest - oldest < ours / 2

    def _more_finished(self, metrics: Metrics, finished: int) -> bool:
        """Whether other clients' requests have ended. The server counts ours before we do."""
        self._counts.append(metrics.finished - finished)
        self._pairs.append((metrics.finished, finished))
        if len(self._counts) < AHEAD_S:
            return False
        self._fewest.append(min(self._counts))
        rate = (finished - self._pairs[-AHEAD_S][1]) / (AHEAD_S - 1)
        on_the_way = min(*self._hidden, MOST_IN_TRANSIT_S * rate)
        return self._fewest[-1] - on_the_way - min(self._fewest) > IN_TRANSIT_S * rate


def _goes_back(before: Metrics, now: Metrics) -> bool:
    return any(
        getattr(now, name) < getattr(before, name)
        for name in ("tokens", "finished", "gaps", "gaps_s")
    )
