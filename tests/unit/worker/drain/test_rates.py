"""A worker's measured rates, from streams of events whose rates are known."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from worker.drain.costs import USUAL, Costs, inverted
from worker.drain.events import Committed, EngineReady, Events, HandedBack, Leased
from worker.drain.rates import Rates
from worker.engine import Capacity

SLOTS = 8
#: Seconds of a token computed, written, and of context read; not in the usual proportion.
TRUE = (40e-6, 300e-6, 0.3e-6)


class Engine:
    """Runs requests in `SLOTS` slots and tells of them as the drain does, on a clock of its own.

    A step writes a token of each request that runs, after the prompts of those that begin.
    """

    def __init__(self, costs: tuple[float, float, float] = TRUE) -> None:
        self.now = 100.0
        self.cached = 0
        self.events = Events()
        self.rates = Rates(self.events, lambda: self.cached, lambda: self.now)
        self.costs = costs
        self.events.publish(
            EngineReady(1.0, Capacity(SLOTS, 4096, "m", kv_tokens=9000, prefix_caching=True), False)
        )
        self._numbers = iter(range(10**9))

    def run(self, requests: list[tuple[int, int]], hits: float = 0.0) -> float:
        """Run (prompt, answer) pairs to their end; return how long it took. `hits` of each prompt
        are in the prefix cache."""
        began, ahead = self.now, 4
        names = {f"w/{next(self._numbers)}": pair for pair in requests}
        waiting, leased, running = list(names), [], dict[str, int]()
        while waiting or running or leased:
            new = waiting[: SLOTS + ahead - len(running) - len(leased)]
            if new:
                del waiting[: len(new)]
                leased += new
                self.events.publish(Leased([_delivery(name) for name in new], 0.0))
            while leased and len(running) < SLOTS:
                name = leased.pop(0)
                running[name] = 0
                self.cached += int(names[name][0] * hits)
                self.now += self.costs[0] * (names[name][0] - int(names[name][0] * hits))
            read = sum(names[name][0] + done for name, done in running.items())
            self.now += self.costs[1] * len(running) + self.costs[2] * read
            running = {name: done + 1 for name, done in running.items()}
            ended = [name for name, done in running.items() if done >= names[name][1]]
            for name in ended:
                del running[name]
            if ended:
                self.events.publish(Committed([_ending(name, *names[name]) for name in ended]))
        return self.now - began

    def idle(self, seconds: float) -> None:
        self.now += seconds

    def planned(self, requests: list[tuple[int, int]]) -> tuple[float, float]:
        """Return the seconds that the announced rates give, and their standard deviation."""
        rates = self.rates.as_json()["rates"]
        amounts = (
            sum(p for p, _ in requests), sum(d for _, d in requests),
            sum(d * (p + d / 2) for p, d in requests),
        )  # fmt: skip
        names = ("prefill_tokens_s", "decode_tokens_s", "context_tokens_s")
        speeds = [rates[name] for name in names]
        seconds = sum(n / speed for n, speed in zip(amounts, speeds, strict=True) if speed)
        rows = rates["covariance"]
        square = sum(rows[i][j] * amounts[i] * amounts[j] for i in range(3) for j in range(3))
        return seconds, square**0.5


def _delivery(name: str) -> Any:
    return SimpleNamespace(lease=name)


def _ending(name: str, prompt: int, written: int) -> Any:
    return SimpleNamespace(
        delivery=_delivery(name), outcome="completed", prompt_tokens=prompt,
        completion_tokens=written,
    )  # fmt: skip


def mixed(count: int, seed: int = 1) -> list[tuple[int, int]]:
    dice = random.Random(seed)
    return [(dice.choice([20, 200, 2000]), dice.choice([5, 50, 200])) for _ in range(count)]


SHORT = [(20, 200)] * 200
LONG = [(3000, 5)] * 400


@pytest.mark.parametrize("file", [SHORT, LONG, mixed(300, 2)])
def test_after_mixed_work_other_shapes_are_foretold(file: list[tuple[int, int]]) -> None:
    engine = Engine()
    engine.run(mixed(1600))
    seconds, deviation = engine.planned(file)
    truth = engine.run(file)
    assert seconds == pytest.approx(truth, rel=0.25)
    assert deviation / truth < 0.15


def test_work_of_one_shape_foretells_itself_and_doubts_what_it_says_of_others() -> None:
    engine = Engine()
    engine.run(SHORT * 2)
    own, sure = engine.planned(SHORT)
    other, unsure = engine.planned(LONG)
    truth = engine.run(SHORT)
    assert own == pytest.approx(truth, rel=0.1)
    assert sure / own < 0.1
    assert unsure / other > 0.3


def test_cached_prompt_tokens_are_not_counted_as_computed() -> None:
    engine = Engine()
    engine.run(mixed(400))
    engine.run(LONG, hits=0.9)
    engine.run(mixed(400, 3))
    truth = engine.run(LONG)  # none is cached now
    assert engine.planned(LONG)[0] == pytest.approx(truth, rel=0.15)


def test_idle_time_does_not_make_a_worker_slower() -> None:
    busy, lazy = Engine(), Engine()
    for part in range(4):
        busy.run(mixed(200, part))
        lazy.run(mixed(200, part))
        lazy.idle(100.0)
    file = mixed(300, 9)
    assert lazy.planned(file)[0] == pytest.approx(busy.planned(file)[0], rel=0.05)


def test_the_latest_work_counts_most() -> None:
    engine = Engine()
    engine.run(mixed(2000))
    engine.costs = (TRUE[0] * 3, TRUE[1] * 3, TRUE[2] * 3)
    file, truth = mixed(300, 9), 0.0
    for part in range(60):
        truth = engine.run(file) if part == 59 else engine.run(mixed(300, part))
    assert engine.planned(file)[0] == pytest.approx(truth, rel=0.1)


def test_nothing_is_announced_before_slots_were_full_for_a_while() -> None:
    engine = Engine()
    engine.run([(100, 10)])
    found = engine.rates.as_json()
    assert "rates" not in found
    assert (found["slots"], found["kv_tokens"], found["prefix_caching"]) == (SLOTS, 9000, True)
    assert (found["mean_answer"], found["mean_prompt"]) == (10.0, 100.0)


def test_half_empty_slots_measure_nothing_and_show_in_the_share_of_full_ones() -> None:
    engine = Engine()
    for _ in range(100):
        engine.run([(100, 100)] * 2)
    found = engine.rates.as_json()
    assert "rates" not in found
    assert found["slots_full"] < 0.2


def test_before_an_engine_runs_nothing_is_known() -> None:
    assert Rates(Events()).as_json() == {}


def test_requests_that_are_handed_back_leave_nothing_behind() -> None:
    engine = Engine()
    engine.run(mixed(300))
    engine.events.publish(Leased([_delivery(f"x/{n}") for n in range(20)], 0.0))
    engine.events.publish(HandedBack([_delivery(f"x/{n}") for n in range(20)], frozenset()))
    before = engine.planned(SHORT)[0]
    engine.run(mixed(300, 2))
    assert engine.planned(SHORT)[0] == pytest.approx(before, rel=0.2)
    held = vars(engine.rates)
    assert not held["_running"]
    assert not held["_waiting"]
    assert len(held["_stretches"]) <= 2


def test_a_request_that_runs_for_very_long_holds_no_endless_memory() -> None:
    engine = Engine()
    engine.events.publish(Leased([_delivery("endless/1")], 0.0))
    for part in range(30):
        engine.run(mixed(300, part))
    assert engine.now > 400
    assert len(vars(engine.rates)["_stretches"]) <= 310


def test_no_cost_is_negative() -> None:
    costs = Costs()
    for prompt, written in [(1000, 10), (10, 100), (500, 60), (2000, 1)] * 20:
        costs.add((prompt, written, written * prompt), 1e-5 * prompt + 5e-5 * written, 1.0)
    fitted = costs.fitted()
    assert fitted is not None
    assert min(fitted[0]) >= 0
    assert fitted[0][1] == pytest.approx(5e-5, rel=0.2)


def test_without_any_other_hint_the_usual_proportion_holds() -> None:
    costs = Costs()
    for _ in range(10):
        costs.add((100 / USUAL[0], 100 / USUAL[1], 100 / USUAL[2]), 3.0, 1.0)
    fitted = costs.fitted()
    assert fitted is not None
    assert fitted[0] == pytest.approx([0.01 * usual for usual in USUAL], rel=0.01)


def test_an_inverse_times_its_matrix_is_one() -> None:
    matrix = [[4.0, 1.0, 0.5], [1.0, 3.0, 0.2], [0.5, 0.2, 2.0]]
    inverse = inverted(matrix)
    product = [[sum(matrix[i][k] * inverse[k][j] for k in range(3)) for j in range(3)]
               for i in range(3)]  # fmt: skip
    for i in range(3):
        assert product[i] == pytest.approx([float(i == j) for j in range(3)])
