"""How fast this worker is, measured while it works; announced for whoever plans a file.

A subscriber of the drain's events: it costs a request a few dictionary operations, and nothing
while nothing runs. Time is cut into stretches. A request's prompt counts where it got its slot,
its answer evenly from there to its end; so a stretch is known when all that ran in it has ended.
Only stretches in which the slots were full say how fast the engine is, and those as long as two
requests: a prompt delays the answers beside it, which shows in nothing but their longer time.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from contract.message import Delivery
from worker.drain.costs import Costs
from worker.drain.events import (
    Committed,
    EngineDied,
    EngineReady,
    Events,
    HandedBack,
    Leased,
    LeasesLost,
)
from worker.engine import Capacity

#: Length of a stretch in seconds, and how many are kept until what ran in them has ended.
STRETCH_S = 1.0
MOST_STRETCHES = 300
#: Of the slots' time, from which share on they were full. The first and last stretch of a batch
#: are not, nor is work that comes more slowly than the engine does it.
FULL = 0.8
#: After so many seconds of work a stretch counts half.
HALF_LIFE_S = 600.0
#: Full stretches are counted together, as long as this many requests take on average, but not
#: longer than so many stretches. With 1 a prompt token came out at less than half of its cost in
#: simulation, with 2 at 0.8, with 4 at 0.9, of fewer measurements.
REQUESTS, LONGEST = 2.0, 30
#: Over how many answers their mean length goes.
ANSWERS = 1000
_KEEP = 0.5 ** (STRETCH_S / HALF_LIFE_S)

#: Prompt tokens, tokens written, tokens of context read, seconds of slots in use, prompt tokens
#: that were cached.
PROMPT, WRITTEN, READ, SLOTS_S, CACHED = range(5)


class Rates:
    """Measures one engine; `cached` returns how many prompt tokens it had in its prefix cache."""

    def __init__(
        self,
        events: Events,
        cached: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._cached_tokens = cached
        self._cached_before = 0
        self._capacity: Capacity | None = None
        self._costs = Costs()
        self._full = [0.0, 0.0]  # stretches that were full, and all with work, the latest most
        self._answers = [0.0] * 4  # how many, their tokens, their prompts', seconds in a slot
        self._together, self._length = [0.0] * 5, 0  # full stretches that are not counted yet
        self._waiting: dict[str, None] = {}  # leases in the order in which they will run
        self._running: dict[str, float] = {}  # lease -> when it got a slot, in that order
        self._stretches: dict[int, list[float]] = {}
        self._from = 0  # stretches before this one are not complete, or done with
        events.subscribe(EngineReady, self._ready)
        events.subscribe(EngineDied, lambda _: self._start_anew())
        events.subscribe(Leased, self._leased)
        events.subscribe(Committed, self._committed)
        events.subscribe(HandedBack, lambda event: self._given_up(event.deliveries))
        events.subscribe(LeasesLost, lambda event: self._given_up(event.deliveries))

    def as_json(self) -> dict[str, Any]:
        """Return what is announced (docs/architecture.md): of an engine that runs, as far as known.

        Rates are tokens a second that the engine would do of one kind alone with full slots.
        """
        able = self._capacity
        if able is None:
            return {}
        found: dict[str, Any] = {"slots": able.max_num_seqs}
        if able.kv_tokens is not None:
            found["kv_tokens"] = able.kv_tokens
        if able.prefix_caching is not None:
            found["prefix_caching"] = able.prefix_caching
        count, tokens, prompts, _ = self._answers
        if count >= 1:
            found |= {"mean_answer": round(tokens / count, 1)}
            found |= {"mean_prompt": round(prompts / count, 1)}
        if self._full[1]:
            found["slots_full"] = round(self._full[0] / self._full[1], 3)
        if fitted := self._costs.fitted():
            costs, covariance = fitted
            names = ("prefill_tokens_s", "decode_tokens_s", "context_tokens_s")
            found["rates"] = {
                name: float(f"{1 / cost:.6g}") if cost > 0 else None
                for name, cost in zip(names, costs, strict=True)
            } | {
                "measured_s": round(self._costs.seconds, 1),
                "covariance": covariance,
            }
        return found

    # -- events -------------------------------------------------------------------

    def _ready(self, event: EngineReady) -> None:
        before, self._capacity = self._capacity, event.capacity
        if before is not None and before.max_num_seqs != event.capacity.max_num_seqs:
            self._costs = Costs()
        self._start_anew()
        self._cached_before = self._cached_tokens()

    def _start_anew(self) -> None:
        self._waiting.clear()
        self._running.clear()
        self._drop_stretches()

    def _drop_stretches(self) -> None:
        self._stretches.clear()
        self._from = self._now() + 1

    def _now(self) -> int:
        return int(self._clock() / STRETCH_S)

    def _leased(self, event: Leased) -> None:
        for delivery in event.deliveries:
            self._waiting[delivery.lease] = None
        self._fill_slots(self._clock())

    def _fill_slots(self, now: float) -> None:
        """Give free slots to those who have waited longest, as engines do."""
        slots = self._capacity.max_num_seqs if self._capacity else 0
        while self._waiting and len(self._running) < slots:
            lease = next(iter(self._waiting))
            del self._waiting[lease]
            self._running[lease] = now

    def _committed(self, event: Committed) -> None:
        now, count, tokens, prompts, in_slots = self._clock(), 0, 0, 0, 0.0
        # By when they began: prompt tokens, tokens written, tokens of context read, requests.
        began: dict[float, list[float]] = {}
        for ending in event.endings:
            lease, prompt, written = (
                ending.delivery.lease, ending.prompt_tokens, ending.completion_tokens
            )  # fmt: skip
            since = self._running.pop(lease, None)
            if since is None:
                self._waiting.pop(lease, None)
                since = now
            if ending.outcome == "completed":
                count, tokens, prompts = count + 1, tokens + written, prompts + prompt
                in_slots += now - since
            done = began.get(since)
            if done is None:
                done = began[since] = [0.0] * 4
            done[0] += prompt
            done[1] += written
            done[2] += written * (prompt + written / 2)
            done[3] += 1
        for since, amounts in began.items():
            self._work(since, now, *amounts)
        cached, self._cached_before = self._cached_before, self._cached_tokens()
        if self._cached_before > cached:
            self._add(int(now / STRETCH_S), CACHED, self._cached_before - cached)
        keep, new = (1 - 1 / ANSWERS) ** count, (count, tokens, prompts, in_slots)
        self._answers = [a * keep + b for a, b in zip(self._answers, new, strict=True)]
        self._fill_slots(now)
        self._fold(now)

    def _given_up(self, deliveries: Iterable[Delivery]) -> None:
        """Forget requests of which nobody will say what they took."""
        for delivery in deliveries:
            self._waiting.pop(delivery.lease, None)
            self._running.pop(delivery.lease, None)
        self._drop_stretches()
        self._fill_slots(self._clock())

    # -- stretches ------------------------------------------------------------------

    def _work(
        self, since: float, until: float, prompt: float, written: float, read: float, slots: float
    ) -> None:
        """Spread what requests in so many slots took over the stretches in which they ran."""
        begin, end = since / STRETCH_S, until / STRETCH_S
        first, last, length = int(begin), int(end), max(end - begin, 1e-9)
        self._add(first, PROMPT, prompt)
        for number in range(max(first, self._from), last + 1):
            share = (min(end, number + 1) - max(begin, number)) / length
            self._add(number, WRITTEN, written * share)
            self._add(number, READ, read * share)
            self._add(number, SLOTS_S, slots * (until - since) * share)

    def _add(self, number: int, kind: int, amount: float) -> None:
        if number >= self._from:
            stretch = self._stretches.get(number)
            if stretch is None:
                stretch = self._stretches[number] = [0.0] * 5
            stretch[kind] += amount

    def _fold(self, now: float) -> None:
        """Count the stretches in which nothing runs any more."""
        oldest = next(iter(self._running.values()), now)
        complete = int(oldest / STRETCH_S)
        if complete <= self._from:
            if int(now / STRETCH_S) - self._from > MOST_STRETCHES:
                self._drop_stretches()  # one request runs for longer than is remembered
            return
        for number in sorted(self._stretches):
            if number < complete:
                self._count(self._stretches.pop(number))
        self._from = complete

    def _count(self, stretch: Sequence[float]) -> None:
        slots = self._capacity.max_num_seqs if self._capacity else math.inf
        full = stretch[SLOTS_S] >= FULL * slots * STRETCH_S
        self._full = [self._full[0] * _KEEP + full, self._full[1] * _KEEP + 1]
        if not full:
            self._together, self._length = [0.0] * 5, 0
            return
        self._together = [a + b for a, b in zip(self._together, stretch, strict=True)]
        self._length += 1
        mean_s = self._answers[3] / self._answers[0] if self._answers[0] else 0.0
        if self._length >= min(LONGEST, REQUESTS * mean_s / STRETCH_S):
            prompt, written, read, _, cached = self._together
            amounts, length = (max(0.0, prompt - cached), written, read), self._length
            self._costs.add(amounts, length * STRETCH_S, _KEEP**length)
            self._together, self._length = [0.0] * 5, 0
