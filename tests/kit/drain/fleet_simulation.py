"""Simulates a fleet of workers and models by seconds: arrivals, swaps, and how long requests wait.

A queue is a list of batches (arrival, tokens left, tokens). A worker takes tokens from the oldest
batch of its queue at its rate. A batch's wait is the time until its first token, by tokens.
"""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from worker.models.policy import Demand, Stay, Terms, choose, default_stay_s

#: Tokens of one request.
REQUEST_TOKENS = 400.0


class Arrival(NamedTuple):
    """A batch that is submitted: the second, its model, its tokens."""

    at_s: int
    model: str
    tokens: float


@dataclass
class Piece:
    """What waits of a batch; `waited` are the seconds of its requests that have started."""

    at_s: int
    tokens: float


@dataclass
class Queue:
    """The waiting work of one model, oldest first."""

    pieces: deque[Piece] = field(default_factory=deque)
    tokens: float = 0.0

    def put(self, arrival: Arrival) -> None:
        """Add a batch."""
        self.pieces.append(Piece(arrival.at_s, arrival.tokens))
        self.tokens += arrival.tokens

    def take(self, tokens: float, now: int, waits: Waits) -> float:
        """Take up to so many tokens, oldest first; return how many there were."""
        taken = 0.0
        while self.pieces and taken < tokens:
            piece = self.pieces[0]
            part = min(piece.tokens, tokens - taken)
            waits.add(now - piece.at_s, part)
            piece.tokens -= part
            taken += part
            if piece.tokens <= 1e-9:
                self.pieces.popleft()
        self.tokens = max(0.0, self.tokens - taken)
        return taken


@dataclass
class Waits:
    """Seconds that tokens waited before they were computed."""

    by_seconds: dict[int, float] = field(default_factory=dict)

    def add(self, seconds: int, tokens: float) -> None:
        """Count so many tokens that waited so long."""
        self.by_seconds[seconds] = self.by_seconds.get(seconds, 0.0) + tokens

    def quantile(self, q: float) -> int:
        """Return the seconds that this share of all tokens waited at most."""
        left = q * sum(self.by_seconds.values())
        for seconds, tokens in sorted(self.by_seconds.items()):
            left -= tokens
            if left <= 0:
                return seconds
        return max(self.by_seconds, default=0)


@dataclass
class Worker:
    """One worker: its model, since when, and until when it swaps."""

    model: str | None = None
    since: int = 0
    swapping_until: int = 0


class Placement(Protocol):
    """Decides for a free worker which model it should load now; None: stay."""

    def next(self, fleet: Fleet, worker: Worker) -> str | None:
        """Return the model to load, or None."""


@dataclass
class Fleet:
    """Workers, queues and the clock of one simulation."""

    models: list[str]
    workers: list[Worker]
    placement: Placement
    rate: float
    swap_s: int
    slots: int = 256
    now: int = 0
    swaps: int = 0
    lost_s: int = 0
    waits: Waits = field(default_factory=Waits)
    queues: dict[str, Queue] = field(default_factory=dict)

    def run(self, arrivals: list[Arrival], until_s: int) -> None:
        """Run until all arrivals are served, at most until a second."""
        self.queues = {model: Queue() for model in self.models}
        coming = deque(sorted(arrivals))
        while self.now < until_s and (coming or any(q.pieces for q in self.queues.values())):
            while coming and coming[0].at_s <= self.now:
                arrival = coming.popleft()
                self.queues[arrival.model].put(arrival)
            for worker in self.workers:
                self._step(worker)
            self.now += 1

    def _step(self, worker: Worker) -> None:
        if worker.swapping_until > self.now:
            self.lost_s += 1
            return
        if (model := self.placement.next(self, worker)) is not None and model != worker.model:
            if worker.model is not None:
                self.swaps += 1
                worker.swapping_until = self.now + self.swap_s
                self.lost_s += 1
            worker.model, worker.since = model, max(self.now, worker.swapping_until)
            if worker.swapping_until > self.now:
                return
        if worker.model is not None:
            self.queues[worker.model].take(self.rate, self.now, self.waits)


@dataclass
class Static:
    """Each worker keeps the model that it was given."""

    def next(self, fleet: Fleet, worker: Worker) -> str | None:
        """Stay."""
        return None


@dataclass
class EachArrival:
    """Serve the oldest request of all, whatever its model: a swap wherever the model differs."""

    def next(self, fleet: Fleet, worker: Worker) -> str | None:
        """Return the model of the oldest request that waits."""
        waiting = [(queue.pieces[0].at_s, m) for m, queue in fleet.queues.items() if queue.pieces]
        return min(waiting)[1] if waiting else None


@dataclass
class Backlog:
    """The product's policy."""

    terms: dict[str, Terms]

    def next(self, fleet: Fleet, worker: Worker) -> str | None:
        """Ask `choose` with what waits and what the other workers serve."""
        demands = {}
        for model, queue in fleet.queues.items():
            others = sum(fleet.slots for w in fleet.workers if w is not worker and w.model == model)
            demands[model] = Demand(
                requests=math.ceil(queue.tokens / REQUEST_TOKENS),
                tokens=queue.tokens,
                oldest_s=fleet.now - queue.pieces[0].at_s if queue.pieces else 0.0,
                slots=others,
            )
        has_work = worker.model is not None and bool(fleet.queues[worker.model].pieces)
        stay = Stay(worker.model, fleet.now - worker.since, has_work, fleet.slots)
        swap = choose(stay, demands, self.terms)
        return swap.model if swap else None


def spread_by_load(models: list[str], arrivals: list[Arrival], count: int) -> list[str]:
    """Return the best static placement: each model one worker, the rest where the day's work is."""
    load = {m: sum(a.tokens for a in arrivals if a.model == m) for m in models}
    placed = dict.fromkeys(models, 1)
    for _ in range(count - len(models)):
        placed[max(models, key=lambda m: load[m] / placed[m])] += 1
    return [model for model in models for _ in range(placed[model])]


def a_day(models: list[str], seed: int, per_day: float, hours: float = 24.0) -> list[Arrival]:
    """Return batches of a day: each model has a size, a rate and busy hours of its own."""
    rng = random.Random(seed)
    weights = {model: rng.paretovariate(1.2) for model in models}
    whole = sum(weights.values())
    found = []
    for model in models:
        budget = per_day * weights[model] / whole
        peak = rng.uniform(0, 24)
        while budget > 0:
            tokens = min(budget, rng.lognormvariate(math.log(2e6), 1.0))
            while True:
                at = rng.uniform(0, hours)
                if rng.random() < 0.15 + 0.85 * (0.5 + 0.5 * math.cos((at - peak) / 24 * math.tau)):
                    break
            found.append(Arrival(int(at * 3600), model, tokens))
            budget -= tokens
    return sorted(found)


class Figures(NamedTuple):
    """What one placement did: seconds of waiting, swaps, the share of time lost to them."""

    p50_s: int
    p95_s: int
    longest_s: int
    swaps: int
    lost: float


def compared(swap_s: int, hours: float, seed: int, load: float = 0.6) -> dict[str, Figures]:
    """Return the figures of 16 workers and 12 models for each placement.

    `load` is the work of a day as a share of what the workers can do.
    """
    models, rate, count = [f"m{n}" for n in range(12)], 4000.0, 16
    day = a_day(models, seed, count * rate * 86_400 * load)
    arrivals = [arrival for arrival in day if arrival.at_s < hours * 3600]
    terms = Terms(swap_s, default_stay_s(swap_s), slot_rate=rate / 256)
    placed = spread_by_load(models, arrivals, count)
    any_model = [models[n % len(models)] for n in range(count)]
    found = {}
    for name, placement, first in (
        ("static", Static(), placed),
        ("each arrival", EachArrival(), any_model),
        ("backlog", Backlog(dict.fromkeys(models, terms)), any_model),
    ):
        fleet = Fleet(models, [Worker(model) for model in first], placement, rate, swap_s)
        fleet.run(arrivals, 4 * 86_400)
        found[name] = Figures(
            fleet.waits.quantile(0.5), fleet.waits.quantile(0.95), fleet.waits.quantile(1.0),
            fleet.swaps, fleet.lost_s / (count * fleet.now),
        )  # fmt: skip
    return found
