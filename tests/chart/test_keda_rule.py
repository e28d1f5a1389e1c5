"""The chart's ScaledObject over the course of some queues: how many workers there are, and when."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from kit.chart.helm_chart import render, values
from kit.chart.keda_rule import EVERY_S, Scaler

from demo.stack import ROOT

RECORDED = ROOT / "tests" / "faults" / "results" / "scaling.json"
TARGET = 600_000
#: A worker's tokens a second, and the seconds that its start takes.
SPEED, START_S = 2000.0, 180.0


def scaler(**autoscaling: Any) -> Scaler:
    """Return the rule that the chart makes of these values."""
    resources = render(
        values(
            workers={"w": {"model": "/m", "autoscaling": {"enabled": True, **autoscaling}}},
            gateway={"store": "s3://files"},
        )
    )
    (found,) = (r["spec"] for r in resources if r["kind"] == "ScaledObject")
    return Scaler(found)


def course(rule: Scaler, arrivals: dict[float, float], hours: float) -> list[tuple[float, int]]:
    """Return (s, replicas) at every change; `arrivals` are tokens by when they are queued, in s."""
    tokens, now, ready, changes = 0.0, 0.0, [0.0] * 0, [(0.0, 0)]
    while now < hours * 3600:
        tokens += sum(n for at, n in arrivals.items() if now <= at < now + EVERY_S)
        tokens = max(0.0, tokens - EVERY_S * SPEED * sum(at <= now for at in ready))
        replicas = rule.decide(now, tokens)
        ready = [*ready, *[now + START_S] * (replicas - len(ready))][:replicas]
        if replicas != changes[-1][1]:
            changes.append((now, replicas))
        now += EVERY_S
    return changes


def test_nobody_works_as_long_as_nothing_is_queued() -> None:
    assert course(scaler(), {}, 1) == [(0, 0)]


def test_a_large_batch_gets_all_workers_and_an_empty_queue_loses_all_of_them() -> None:
    changes = course(scaler(maxReplicas=8), {60: 20 * TARGET}, 5)
    assert [count for _, count in changes] == [0, 1, 5, 8, 0]
    done_s = 60 + START_S + 20 * TARGET / (8 * SPEED)
    assert done_s + 600 - 2 * EVERY_S < changes[-1][0] < done_s + 600 + 60


def test_while_there_is_work_workers_leave_one_by_one_and_not_soon() -> None:
    rule, changes = scaler(maxReplicas=8), [(0.0, 0)]
    for tick in range(4 * 240):  # eight workers' work, that becomes one's within an hour
        at = tick * EVERY_S
        replicas = rule.decide(at, TARGET * max(1.0, 8 - 8 * at / 3600))
        if replicas != changes[-1][1]:
            changes.append((at, replicas))
    assert [count for _, count in changes] == [0, 1, 5, 8, 7, 6, 5, 4, 3, 2, 1]
    down = [at for at, count in changes[4:]]
    assert down[0] > 900
    assert all(later - earlier >= 300 for earlier, later in itertools.pairwise(down))


def test_a_trickle_of_long_requests_keeps_one_worker() -> None:
    """One of 30 s every five minutes: the cooldown is longer."""
    changes = course(scaler(), {60.0 + 300 * n: 60_000 for n in range(24)}, 3)
    assert [count for _, count in changes] == [0, 1, 0]


def test_requests_that_come_and_end_between_two_looks_are_not_seen() -> None:
    """What docs/how-to/kubernetes.md says of them: such a model wants a worker that stays."""
    short = {60.0 + 300 * n: 2000.0 for n in range(24)}
    assert [count for _, count in course(scaler(), short, 3)][:4] == [0, 1, 0, 1]
    assert [count for _, count in course(scaler(minReplicas=1), short, 3)] == [0, 1]


def test_waves_do_not_stop_workers_that_the_next_wave_needs() -> None:
    """A batch every ten minutes; workers wait 15 minutes before the first one leaves."""
    changes = course(scaler(maxReplicas=4), {60.0 + 600 * n: 4 * TARGET for n in range(12)}, 2)
    counts = [count for _, count in changes]
    assert counts[:3] == [0, 1, 4]
    assert counts == [0, 1, 4]


def test_running_requests_alone_keep_a_worker() -> None:
    rule = scaler()
    rule.decide(0, 1000)
    for minute in range(1, 600):  # one long request, nothing waits
        assert rule.decide(60 * minute, 256) == 1
    assert rule.decide(60 * 600, 0) == 1
    assert rule.decide(60 * 611, 0) == 0


@pytest.mark.parametrize("most", [1, 3])
def test_never_more_workers_than_allowed(most: int) -> None:
    changes = course(scaler(maxReplicas=most), {0: 100 * TARGET}, 4)
    assert max(count for _, count in changes) == most


def test_the_rule_says_of_a_recorded_queue_what_it_said_when_its_workers_followed_it() -> None:
    """docs/evidence/kubernetes.md shows that course; tests/faults/run_scaling.py records it."""
    recorded = json.loads(RECORDED.read_text())
    rule = scaler(maxReplicas=4, tokensPerReplica=600)
    assert rule.spec == recorded["spec"]
    rows = [dict(zip(recorded["columns"], row, strict=True)) for row in recorded["rows"]]
    assert [rule.decide(row["s"], row["tokens"]) for row in rows] == [
        row["replicas"] for row in rows
    ]
    assert (rows[0]["replicas"], rows[-1]["replicas"]) == (0, 0)
    assert max(row["replicas"] for row in rows) == 4
    assert all(row["tokens"] == 0 for row in rows if row["replicas"] == 0)


def test_by_what_waits_alone_the_rule_would_stop_workers_over_running_requests() -> None:
    """Why the chart's trigger counts what runs too: the same recorded queue says so."""
    rule = scaler(maxReplicas=4, tokensPerReplica=600, cooldownS=30)
    over = [
        in_flight
        for at_s, tokens, waiting, in_flight, *_ in json.loads(RECORDED.read_text())["rows"]
        if rule.decide(at_s, waiting * tokens / max(1, waiting + in_flight)) == 0 and in_flight
    ]
    assert sum(over) > 0
