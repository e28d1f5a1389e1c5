"""The control loop at a simulated server with histograms: bursts, bad metrics, two workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from statistics import fmean, median

import pytest
from kit.servers.histogram_server import HistogramServer

from worker.engine.openai.guard import FIRST, PROBES, QUIET_PROBES, Guard, Observed
from worker.engine.openai.metrics import COMPARED_S, Seconds, read_metrics

Page = Callable[[bytes], bytes]


@dataclass
class Worker:
    """One worker with requests: its share of the limit, and its requests in flight."""

    share: int = 0
    own: int = 0
    #: What the leader knows of it: its requests in flight a second ago, at most.
    known: int = 0
    want: int = 10_000


@dataclass
class Loop:
    """Workers at one server: the first leads, and knows the others as they were a second ago."""

    server: HistogramServer
    workers: Sequence[Worker] = field(default_factory=lambda: [Worker()])
    guard: Guard = field(default_factory=Guard)
    seconds: Seconds = field(default_factory=Seconds)
    finished: int = 0
    limits: list[int] = field(default_factory=list)
    felt_ms: list[float] = field(default_factory=list)

    def run(self, count: int, page: Page = lambda page: page, probe_s: float | None = -1) -> None:
        """Let seconds pass; `page` changes the server's metrics, `probe_s` the probes' time."""
        for _ in range(count):
            self._second(page, probe_s)

    def _second(self, page: Page, probe_s: float | None) -> None:
        own = sum(worker.own for worker in self.workers)
        ended = self.server.second(own)
        self.finished += ended
        self.felt_ms.append(self.server.first_token_p99_ms)
        known = self.workers[0].own + sum(worker.known for worker in self.workers[1:])
        shown = self.seconds.next(read_metrics(page(self.server.page())), known, self.finished)
        if probe_s == -1:
            probe_s = self.server.probe_s(PROBES if own else QUIET_PROBES)
        observed = Observed(known, probe_s, shown.itl_s, shown.waiting, shown.other_clients)
        self.limits.append(self.guard.step(observed))
        self._hand_out(ended)

    def _hand_out(self, ended: int) -> None:
        """Give each worker its share, as server_share.lua does, and let it use the share."""
        for place, worker in enumerate(self.workers):
            worker.own = max(0, worker.own - ended // len(self.workers))
            others = [one for one in self.workers if one is not worker]
            even = (self.guard.limit + place) // len(self.workers)
            used = sum(max(one.share, one.own) for one in others)
            worker.share = max(0, min(even, self.guard.limit - used))
        for worker in self.workers:
            worker.known = max(worker.own, worker.share)
            worker.own = max(worker.own, min(worker.share, worker.want))


def night(**settings: float) -> Loop:
    """Return a loop at a server that nobody else uses, with the highest limit."""
    loop = Loop(HistogramServer(people_s=0, **settings))  # type: ignore[arg-type]
    loop.run(200)
    assert loop.guard.limit > 230
    return loop


def spread(limits: Sequence[int]) -> float:
    """Return the part of the limits that are more than a fifth away from their mean."""
    middle = fmean(limits)
    return sum(abs(limit - middle) > 0.2 * middle for limit in limits) / len(limits)


@pytest.mark.parametrize("people_s", [1, 5, 20])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_in_steady_state_the_limit_stays_within_a_fifth(people_s: float, workers: int) -> None:
    loop = Loop(HistogramServer(people_s), [Worker() for _ in range(workers)])
    loop.run(600)
    steady = loop.limits[200:]
    assert fmean(steady) > 16
    assert min(steady) > 0
    assert spread(steady) <= 0.02


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_a_burst_of_people_pauses_everything_in_one_step(workers: int, seed: int) -> None:
    loop = Loop(HistogramServer(0, seed=seed), [Worker() for _ in range(workers)])
    loop.run(250)
    assert loop.guard.limit > 230
    loop.server.people_s = 20
    loop.run(1)
    assert loop.limits[-1] == 0
    assert loop.guard.paused
    loop.run(60)
    assert loop.limits[-1] > 0
    assert max(loop.felt_ms[-40:]) < 3 * 92


@pytest.mark.parametrize("seed", range(3))
def test_a_step_up_of_people_is_answered_and_a_step_down_is_used(seed: int) -> None:
    loop = Loop(HistogramServer(1, seed=seed))
    loop.run(300)
    few = fmean(loop.limits[-100:])
    loop.server.people_s = 40
    loop.run(300)
    many = fmean(loop.limits[-100:])
    loop.server.people_s = 1
    loop.run(300)
    again = fmean(loop.limits[-100:])
    assert many < few
    assert 0.75 * few < again < 1.25 * few


def test_two_workers_get_even_shares_and_never_more_than_the_limit() -> None:
    loop = Loop(HistogramServer(), [Worker(), Worker()])
    loop.run(200)
    for _ in range(100):
        loop.run(1)
        first, second = (worker.share for worker in loop.workers)
        assert first + second <= loop.guard.limit
        assert abs(first - second) <= 2 + 0.1 * loop.guard.limit


# -- what was recorded at an H100 ---------------------------------------------------------

#: Requests that waited in the server at looks of one night: they came during a step.
CAME = (0, 5, 27, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 6, 10, 0, 0, 7, 12, 0, 11)


def came_during_a_step() -> Page:
    """Return pages on which some of the running requests wait, as in CAME."""
    counts = cycle(CAME)

    def change(page: bytes) -> bytes:
        lines = dict(line.rsplit(b" ", 1) for line in page.splitlines())
        running, waiting = b"vllm:num_requests_running", b"vllm:num_requests_waiting"
        more = min(next(counts), int(lines[running]) // 8)
        lines[running] = b"%d" % (int(lines[running]) - more)
        lines[waiting] = b"%d" % (int(lines[waiting]) + more)
        return b"\n".join(b" ".join(line) for line in lines.items())

    return change


@pytest.mark.parametrize("seed", range(5))
def test_a_night_reaches_the_ceiling_within_a_minute_and_stays_there(seed: int) -> None:
    loop, page = Loop(HistogramServer(0, seed=seed)), came_during_a_step()
    loop.run(60, page)
    assert loop.limits[-1] >= 0.95 * loop.guard.ceiling
    loop.run(600, page)
    assert min(loop.limits[-600:]) >= 0.95 * loop.guard.ceiling
    assert loop.guard.shown()["nobody_else"]


def test_what_waits_at_three_looks_at_night_lowers_the_limit_once() -> None:
    loop = Loop(HistogramServer(0, slots=100))
    loop.run(200)
    assert min(loop.limits[-100:]) >= 97
    assert max(loop.limits[-100:]) <= 104


@pytest.mark.parametrize("seed", range(5))
def test_one_late_probe_does_not_pause_and_two_do(seed: int) -> None:
    loop = Loop(HistogramServer(5, seed=seed))
    loop.run(200)
    before, target_s = loop.limits[-1], loop.guard.ttft.target_s
    assert target_s
    loop.run(1, probe_s=2.9 * target_s)
    assert loop.limits[-1] > 0.7 * before
    loop.run(10)
    assert min(loop.limits[-10:]) > 0.7 * before
    loop.run(3, probe_s=2.1 * target_s)  # a cut in between forgets the first of them
    assert loop.limits[-1] == 0
    loop.run(20)
    loop.run(1, probe_s=3.1 * target_s)
    assert loop.limits[-1] == 0


@pytest.mark.parametrize("people_s", [1, 5, 20])
@pytest.mark.parametrize("seed", range(5))
def test_the_start_does_not_pause_because_each_doubling_is_felt_first(
    people_s: float, seed: int
) -> None:
    loop = Loop(HistogramServer(people_s, seed=seed))
    loop.run(120)
    limits = loop.limits[loop.limits.index(FIRST) :]
    assert 0 not in limits
    assert max(limits[:40]) >= 56
    for n in range(2, len(limits)):
        if limits[n] > 1.25 * limits[n - 1] and limits[n - 1] > 1.25 * FIRST:
            assert limits[n - 2] == limits[n - 1]


def test_after_a_pause_small_limits_double_while_all_is_far_below_the_targets() -> None:
    reached = []
    for seed in range(5):
        loop = Loop(HistogramServer(0, seed=seed))
        loop.run(200)
        loop.server.people_s = 20
        loop.run(2)
        assert loop.limits[-1] == 0
        loop.server.people_s = 0.5
        loop.run(28)
        reached.append(loop.limits[-1])
    assert median(reached) >= 64  # by one a second it would be 30
    assert min(reached) >= 30


# -- metrics that show nothing, or something wrong ---------------------------------------


def without(*names: bytes) -> Page:
    return lambda page: b"\n".join(
        line for line in page.splitlines() if not any(name in line for name in names)
    )


def every(value: bytes) -> Page:
    """Return the same page with this value everywhere."""
    return lambda page: b"\n".join(line.rpartition(b" ")[0] + b" " + value
                                   for line in page.splitlines())  # fmt: skip


BAD = {
    "none": lambda page: b"",
    "zero": every(b"0"),
    "NaN": every(b"NaN"),
    "infinite": every(b"+Inf"),
    "negative": every(b"-1"),
    "words": every(b"many"),
    "no histogram": without(b"inter_token"),
    "no running": without(b"num_requests_running"),
    "cut": lambda page: page[: len(page) // 2],
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_metrics_are_not_taken_for_a_server_without_people(bad: str) -> None:
    loop = Loop(HistogramServer(5))
    loop.run(200)
    before = fmean(loop.limits[-100:])
    loop.run(300, BAD[bad])
    late = loop.limits[-250:]
    assert max(late) <= 1.4 * before
    assert fmean(loop.felt_ms[-250:]) < 3 * 60


@pytest.mark.parametrize("bad", BAD)
def test_bad_metrics_from_the_start_leave_the_probe_as_the_measure(bad: str) -> None:
    loop = Loop(HistogramServer(5))
    loop.run(300, BAD[bad])
    assert loop.limits[-1] > 0
    assert fmean(loop.felt_ms[-200:]) < 3 * 60


@pytest.mark.parametrize("name", [b"num_requests", b"request_success", b"request"])
def test_a_server_that_does_not_show_our_requests_does_not_count_as_ours_alone(
    name: bytes,
) -> None:
    def hide(page: bytes) -> bytes:
        lines = page.splitlines()
        return b"\n".join(every(b"0")(line) if name in line else line for line in lines)

    loop = Loop(HistogramServer(5))
    loop.run(300, hide)
    assert not loop.guard.shown()["nobody_else"]
    assert fmean(loop.felt_ms[-200:]) < 3 * 60


def test_one_lost_page_at_night_changes_nothing_and_more_of_them_do() -> None:
    loop = night()
    before = loop.guard.limit
    loop.run(1, BAD["none"])
    assert loop.guard.limit == before
    loop.run(5)
    assert loop.guard.limit >= before
    loop.run(COMPARED_S, BAD["none"])
    assert loop.guard.limit < before


def test_counters_that_begin_again_are_answered_by_the_probe_alone_and_believed_later() -> None:
    loop = Loop(HistogramServer(5))
    loop.run(200)
    before = fmean(loop.limits[-50:])
    loop.server.restart()
    loop.run(30)
    assert max(loop.limits[-30:]) <= 1.3 * before
    loop.run(300)
    assert fmean(loop.limits[-50:]) == pytest.approx(before, rel=0.25)


def test_quiet_values_from_before_need_no_learning() -> None:
    loop = Loop(HistogramServer(5))
    loop.guard.learn(0.022, 0.0065)
    loop.run(1)
    assert loop.limits == [FIRST]
    loop.run(300)
    steady = fmean(loop.limits[-100:])
    fresh = Loop(HistogramServer(5))
    fresh.run(300)
    assert steady == pytest.approx(fmean(fresh.limits[-100:]), rel=0.2)
    assert fresh.guard.quiet == pytest.approx((0.022, 0.0065), rel=0.3)


def test_a_new_leader_goes_on_from_the_limit_that_it_finds() -> None:
    before = Loop(HistogramServer(5), [Worker()])
    before.run(300)
    after = Loop(before.server, before.workers, finished=before.finished)
    after.guard.learn(*before.guard.quiet)
    after.guard.take_over(before.guard.limit)
    after.run(100)
    middle = fmean(before.limits[-100:])
    assert min(after.limits) > 0.7 * middle
    assert max(after.limits) < 1.3 * middle


def test_a_new_leader_goes_on_from_a_pause_also_if_it_has_led_before() -> None:
    loop = Loop(HistogramServer(5))
    loop.run(200)
    loop.guard.take_over(0)
    assert (loop.guard.limit, loop.guard.paused) == (0, True)
    loop.run(1)
    assert loop.limits[-1] <= FIRST


def test_a_time_of_zero_is_no_measurement() -> None:
    guard = Guard()
    for _ in range(20):
        guard.step(Observed(0, 0.0, 0.0, 0, True))
    assert guard.shown()["ttft_ms_target"] is None
    assert guard.shown()["itl_ms_target"] is None
