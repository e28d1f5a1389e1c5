"""The guard's limit at a simulated server, whose times were measured on an H100 (one 8B model)."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from random import Random
from statistics import fmean, median

import pytest
from kit.servers.histogram_server import measured

from worker.engine.openai.guard import FIRST, LEARN, NOBODY, PROBES, QUIET_PROBES, Guard, Observed
from worker.engine.openai.metrics import DISTRUST_S, FROZEN_S, Metrics, Second, Seconds

#: Part of our requests that end in a second.
ENDS = 0.25


@dataclass
class Server:
    """A server with `slots`, at which `people` requests of others run; ours follow the limit."""

    guard: Guard
    people: int = 5
    slots: int = 256
    want: int = 10_000
    random: random.Random = field(default_factory=lambda: random.Random(7))
    own: int = 0
    limits: list[int] = field(default_factory=list)
    waited: list[int] = field(default_factory=list)
    between_ms: float = 0.0

    def felt(self) -> Observed:
        """Return one second's measurements."""
        rows = self.people + self.own
        _, middle, late, between_ms = measured(rows)
        spread = (late / middle - 1) / 2.33  # p99 is 2.33 deviations above the middle

        def probe() -> float:
            return middle * max(0.3, self.random.gauss(1, spread))

        ttft_ms = median(probe() for _ in range(PROBES if self.own else QUIET_PROBES))
        self.between_ms = between_ms * self.random.gauss(1, 0.05)
        waiting = max(0, rows - self.slots)
        return Observed(self.own, ttft_ms / 1000, self.between_ms / 1000, waiting, self.people > 0)

    def second(self, **changed: object) -> None:
        """Let one second pass; `changed` replaces measurements."""
        felt = self.felt()
        self.waited.append(felt.waiting or 0)
        seen = {name: getattr(felt, name) for name in Observed.__slots__} | changed
        limit = self.guard.step(Observed(**seen))  # type: ignore[arg-type]
        left = int((1 - ENDS) * self.own)
        self.own = max(left, min(limit, self.want))
        self.limits.append(limit)

    def run(self, seconds: int, **changed: object) -> list[int]:
        """Let these seconds pass; return the limits."""
        for _ in range(seconds):
            self.second(**changed)
        return self.limits[-seconds:]


@pytest.mark.parametrize("people", [1, 5, 40])
@pytest.mark.parametrize("seed", range(5))
def test_in_steady_state_the_limit_moves_by_at_most_a_fifth(people: int, seed: int) -> None:
    server = Server(Guard(), people, random=random.Random(seed))
    server.run(120)
    steady = sorted(server.run(600))
    middle = fmean(steady)
    assert middle > 24
    inside = [limit for limit in steady if abs(limit - middle) <= 0.2 * middle]
    assert len(inside) >= 0.98 * len(steady)
    assert min(steady) > 0


@pytest.mark.parametrize("seed", range(5))
def test_people_feel_no_more_than_the_targets(seed: int) -> None:
    server = Server(Guard(ttft_s=0.1, itl_s=0.016), random=random.Random(seed))
    server.run(120)
    rows = [server.people + limit for limit in server.run(300)]
    assert fmean(measured(n)[3] for n in rows) <= 16
    assert fmean(measured(n)[1] for n in rows) <= 100


def test_nobody_is_there_and_all_that_the_server_can_start_runs() -> None:
    server = Server(Guard(), people=0, slots=100)
    server.run(LEARN + NOBODY + 60)
    night = server.run(300)
    assert min(night) >= 98
    assert max(server.waited[-300:]) <= 3
    assert fmean(server.waited[-300:]) < 1.0


@pytest.mark.parametrize("seed", range(5))
def test_people_who_come_back_at_once_find_a_pause_within_a_second(seed: int) -> None:
    server = Server(Guard(), people=0, random=random.Random(seed))
    server.run(120)
    assert server.guard.limit > 200
    server.people = 40
    assert server.run(1) == [0]
    assert server.guard.why.startswith("paused: ")
    server.run(4)
    assert server.people + server.own < 150
    server.run(60)
    assert server.guard.limit > 0


def test_a_probe_that_comes_much_too_late_pauses_before_the_second_ends() -> None:
    server = Server(Guard())
    server.run(60)
    assert server.guard.limit > 0
    assert server.guard.alarm(0.001) > 0
    assert server.guard.alarm(2.0) == 0
    assert "first token after 2000.0 ms" in server.guard.why


def test_requests_begin_after_the_quiet_values_are_known_and_begin_with_few() -> None:
    server = Server(Guard())
    assert server.run(2) == [0, 0]
    assert server.guard.learning
    assert server.run(1) == [FIRST]
    known = Server(Guard(ttft_s=1, itl_s=1))
    assert known.run(1) == [FIRST]
    unmeasured = Guard()
    limits = [unmeasured.step(Observed(0)) for _ in range(LEARN + 1)]
    assert limits[-1] == FIRST  # a server that shows nothing is used, too


def test_a_limit_of_0_grows_while_requests_of_other_workers_run() -> None:
    guard = Guard(ttft_s=1, itl_s=1)
    limits = [guard.step(Observed(4, 0.1, 0.01, 0, True)) for _ in range(3)]
    assert limits[0] > 0


def test_after_an_idle_time_few_requests_begin() -> None:
    server = Server(Guard())
    server.run(120)
    server.want = 0
    server.run(40)
    assert server.guard.limit == FIRST


def test_a_rush_hour_does_not_become_the_measure() -> None:
    server = Server(Guard(), want=0)
    server.run(30)
    before = server.guard.itl.target_s
    assert before
    server.people = 200
    server.run(10)
    assert server.guard.itl.target_s
    assert server.guard.itl.target_s < 2 * before


LOST = {"itl_s": None, "waiting": None, "other_clients": None}


def test_without_metrics_the_limit_does_not_grow_and_the_probe_still_cuts() -> None:
    server = Server(Guard(ttft_s=0.1, itl_s=1.0))
    server.run(60)
    before = server.guard.limit
    assert max(server.run(60, **LOST)) <= before
    server.people = 150
    assert server.run(5, **LOST)[-1] < before / 2
    server.people = 5
    server.run(180)
    assert server.guard.limit > before / 2


def test_without_any_measurement_the_limit_shrinks_to_one_and_comes_back() -> None:
    server = Server(Guard())
    server.run(60)
    assert server.run(60, **LOST, ttft_s=None)[-1] == 1
    assert server.guard.why == "nothing can be measured"
    assert server.run(120)[-1] > 24


def test_a_server_without_metrics_is_guarded_by_the_probe() -> None:
    server = Server(Guard(ttft_s=0.08))
    server.run(200, **LOST)
    steady = server.run(200, **LOST)
    assert 40 < fmean(steady) < 220


def test_metrics_that_praise_themselves_do_not_outweigh_the_probe() -> None:
    server = Server(Guard())
    server.run(60)
    praise = {"itl_s": 0.0001, "waiting": 0}
    limits = server.run(200, **praise)
    assert fmean(measured(5 + limit)[1] for limit in limits[50:]) < 3 * 30


def test_people_who_wait_stop_everything_and_our_own_that_wait_are_taken_back() -> None:
    busy = Guard(ttft_s=1, itl_s=1)
    assert busy.step(Observed(0, 0.1, 0.01, 0, True)) == FIRST
    assert busy.step(Observed(8, 0.1, 0.01, 3, True)) == FIRST  # one look
    assert busy.step(Observed(8, 0.1, 0.01, 3, True)) == 5
    assert busy.step(Observed(5, 0.1, 0.01, 30, True)) == 0
    assert busy.step(Observed(5, 0.1, 0.01, 2, True)) == 0
    assert busy.step(Observed(5, 0.1, 0.01, 0, True)) > 0


# -- what one second's metrics show ----------------------------------------------------


def page(n: int, **changed: float) -> Metrics:
    values = {"running": 4, "waiting": 0, "kv": 0.1, "tokens": 100.0 * n, "finished": 5.0 * n,
              "gaps": 90.0 * n, "gaps_s": 0.9 * n}  # fmt: skip
    return Metrics(**(values | changed))


def test_a_second_shows_the_mean_time_between_its_tokens() -> None:
    seconds = Seconds()
    assert seconds.next(page(1), 4, 5) == Second()
    shown = seconds.next(page(2), 4, 10)
    assert shown.itl_s == pytest.approx(0.01)
    assert (shown.waiting, shown.other_clients) == (0, False)
    assert seconds.next(page(3, gaps=180, gaps_s=1.8), 4, 15).itl_s is None
    assert seconds.next(None, 4, 20) == Second()


def test_others_are_seen_while_they_run_and_when_they_have_finished() -> None:
    seconds, seen = Seconds(), []
    for n in range(1, 30):
        theirs = n // 12  # two requests, too short to be seen running
        ours = 5 * n - (n % 3)  # the server counts ours a little before we do
        seen.append(seconds.next(page(n, finished=5 * n + theirs), 4, ours).other_clients)
    assert seen[1:12] == [False] * 11
    assert seen[-5:] == [True] * 5  # for a minute: they come rarely
    assert Seconds().next(page(1), 3, 0).other_clients is None
    running = Seconds()
    running.next(page(1), 3, 5)
    assert running.next(page(2), 3, 10).other_clients is True


def test_answers_on_the_way_are_not_those_of_others() -> None:
    seconds, random, seen = Seconds(), Random(5), []
    for n in range(1, 200):
        on_the_way = random.randint(0, 6)
        seen.append(seconds.next(page(n, finished=60.0 * n), 4, 60 * n - on_the_way).other_clients)
    assert True not in seen
    slow = [
        seconds.next(page(n, finished=60.0 * n + n // 4 - 50), 4, 60 * n - random.randint(0, 6))
        for n in range(200, 300)
    ]
    assert [shown.other_clients for shown in slow[60:]] == [True] * 40


def busy_night(others_s: float, seed: int) -> list[bool | None]:
    """Return what 200 seconds show of others, as on an H100: 163 in flight, 5 to 28 hidden.

    The worker reads its answers late, and later under load than at the start.
    """
    seconds, random, seen = Seconds(), Random(seed), []
    for n in range(1, 200):
        own = 163 if n > 12 else 13 * n
        hidden = random.randint(5, 28) if n > 12 else 0
        ended = sum(60 if k > 12 else 5 * k for k in range(1, n + 1))
        finished = max(0, ended - random.randint(hidden // 3, hidden * 3 // 4))
        server = page(n, running=own - hidden, finished=float(ended + int(others_s * n)))
        seen.append(seconds.next(server, own, finished).other_clients)
    return seen


@pytest.mark.parametrize("seed", range(10))
def test_at_night_nobody_is_seen_although_our_answers_are_read_late(seed: int) -> None:
    assert True not in busy_night(0, seed)
    assert busy_night(1, seed)[90:] == [True] * 109


def test_what_ended_during_the_latest_step_is_not_anothers() -> None:
    seconds = Seconds()
    seconds.next(page(1, running=8), 8, 5)
    assert seconds.next(page(2, running=8), 6, 10).other_clients is False
    assert seconds.next(page(3, running=8), 6, 15).other_clients is True


def test_counters_that_go_back_or_stand_still_are_not_believed() -> None:
    seconds = Seconds()
    for n in range(1, 5):
        seconds.next(page(n), 4, n)
    assert seconds.next(page(2), 4, 5) == Second()  # another replica's page, or a new start
    later = [seconds.next(page(n), 4, n) for n in range(3, 3 + DISTRUST_S)]
    assert later[:-1] == [Second()] * (DISTRUST_S - 1)
    assert later[-1] != Second()
    frozen = Seconds()
    shown = [frozen.next(page(1), 4, n) for n in range(FROZEN_S + 2)]
    assert shown[FROZEN_S - 1] != Second()
    assert shown[FROZEN_S + 1] == Second()
