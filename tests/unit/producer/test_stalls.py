"""Stalls: what they say, and when there is none."""

from __future__ import annotations

import pytest

from contract.batch import Batch
from contract.redis.deadlines import LateBatch
from producer.lost_leases import LostLeases
from producer.stall_texts import TEXTS
from producer.stalls import (
    STOPPED_S,
    late_stall,
    lease_stall,
    memory_stall,
    queue_stall,
    submit_stall,
)
from producer.start_command import start_command


def worker(state: str, why: str = "") -> dict[str, str]:
    return {"state": state, "why": why, "queue": "warmq.gpt-4"}


def silent(state: str) -> dict[str, object]:
    return worker(state) | {"id": "celery@a.12.0a1b", "overdue": True, "silent_s": 4.2}


def of_two(state: str, *, failed: bool = False) -> dict[str, object]:
    """Return what a worker of two models announces; `gpt-4` is not the loaded one."""
    models = {"gpt-4": "warmq.gpt-4", "other": "warmq.other"}
    why = {"gpt-4": {"why": "no such folder: gpt-4", "tries": 2, "again_at": 0}} if failed else {}
    return {"state": state, "queue": "warmq.other", "models": models, "unloadable": why}


@pytest.mark.parametrize(("silent_s", "passing"), [(3.0, True), (6.0, False)])
def test_a_worker_that_is_silent_for_a_moment_is_perhaps_only_busy(
    silent_s: float, passing: bool
) -> None:
    workers = [silent("ready") | {"silent_s": silent_s}]
    found = queue_stall("warmq.gpt-4", "gpt-4", 1, workers, workers)
    assert found is not None and (found.code, found.passing) == ("workers_silent", passing)


@pytest.mark.parametrize(
    ("workers", "waiting", "code"),
    [
        ([], 5, "queue_unserved"),
        ([], 0, None),
        ([worker("ready")], 5, None),
        ([worker("ready", "waits for a:1: 502"), worker("degraded")], 5, None),
        ([worker("degraded", "waits for a:1: refused")], 0, "servers_unreachable"),
        ([worker("starting", "waits for a:1"), worker("draining")], 5, "servers_unreachable"),
        ([worker("degraded", "waits for a:1"), worker("degraded")], 5, "workers_degraded"),
        ([worker("degraded", "CUDA error")], 0, "workers_degraded"),
        ([worker("degraded"), worker("starting")], 5, "workers_starting"),
        ([worker("starting")], 0, None),
        ([worker("draining")], 5, "workers_draining"),
        ([silent("ready")], 0, "workers_silent"),
        ([silent("ready"), silent("ready"), worker("draining")], 5, "workers_silent"),
        ([silent("ready"), worker("ready")], 5, None),
        ([silent("ready"), worker("starting")], 5, "workers_starting"),
        ([silent("draining")], 0, "workers_silent"),
        ([silent("ready") | {"redis_up_s": 4.0}], 5, None),
        ([worker("draining")], 0, None),
        ([of_two("ready", failed=True)], 0, "model_unloadable"),
        ([of_two("starting", failed=True)], 5, "model_unloadable"),
        ([of_two("ready", failed=True), of_two("ready")], 5, "model_not_loaded"),
        ([of_two("ready")], 0, None),
        ([of_two("swapping"), of_two("ready")], 5, "model_not_loaded"),
        ([of_two("starting")], 5, "workers_starting"),
        ([of_two("degraded")], 5, "workers_degraded"),
        ([of_two("ready"), worker("ready")], 5, None),
        ([of_two("ready"), worker("starting")], 5, "workers_starting"),
        ([of_two("ready"), worker("draining")], 5, "model_not_loaded"),
        ([of_two("ready", failed=True), worker("starting")], 5, "workers_starting"),
    ],
)
def test_a_queue_is_stalled_where_no_worker_can_run_its_requests(
    workers: list[dict[str, object]], waiting: int, code: str | None
) -> None:
    found = queue_stall("warmq.gpt-4", "gpt-4", waiting, workers, workers)
    assert (found and found.code) == code
    if found:
        assert found.facts["waiting"] == waiting
        assert "gpt-4" in found.sentence()
        assert found.advice()
    other = queue_stall("warmq.other", "warmq", waiting, workers, workers)
    assert other is None or other.code != "model_unloadable"


NAMED = "WARMQ_SERVED_MODEL_NAME"
OTHERS = [
    {"queue": "warmq", "name": "tiny", "state": "ready"},
    {"queue": "warmq.big", "state": "ready"},
    {"queue": "batches", "name": "far", "state": "ready"},
]


@pytest.mark.parametrize(
    ("queue", "default", "remedy"),
    [
        ("warmq.gpt-4", "warmq", f"`{NAMED}=gpt-4 warmq-worker`"),
        ("warmq.a b", "warmq", f"`{NAMED}='a b' warmq-worker`"),
        ("warmq", "warmq", f"`warmq-worker` without {NAMED}"),
        ("nights", "nights", f"`WARMQ_QUEUE=nights warmq-worker` without {NAMED}"),
        ("nights.x", "nights", f"`WARMQ_QUEUE=nights {NAMED}=x warmq-worker`"),
        ("nights.x", "warmq", f"`WARMQ_QUEUE=nights.x warmq-worker` without {NAMED}"),
    ],
)
def test_the_remedy_starts_a_worker_of_exactly_the_queue_that_has_none(
    queue: str, default: str, remedy: str
) -> None:
    found = queue_stall(queue, default, 5, [], [])
    assert found is not None
    assert found.code == "queue_unserved"
    assert remedy in found.advice()
    assert f"no worker serves {queue} (" not in found.sentence()


@pytest.mark.parametrize(
    ("announced", "command"),
    [
        ({"model": "models/tiny"}, "WARMQ_MODEL=models/tiny warmq-worker"),
        ({"model": "my models/x"}, "WARMQ_MODEL='my models/x' warmq-worker"),
        ({"model": "/srv/models/tiny"}, "WARMQ_MODEL=…/tiny warmq-worker"),
        ({"model": "models/\x1b[2J"}, "WARMQ_MODEL=… warmq-worker"),
        ({"model": "models/tiny", "queue": "warmq.other"}, "WARMQ_MODEL=… warmq-worker"),
        ({"model": "tiny", "models": {"tiny": "warmq"}}, "WARMQ_MODEL=… warmq-worker"),
        ({}, "WARMQ_MODEL=… warmq-worker"),
    ],
)
def test_the_command_names_the_model_that_was_served_last_and_invents_none(
    announced: dict[str, object], command: str
) -> None:
    last = {"queue": "warmq", "silent_s": 40.0} | announced
    seen = [last | {"silent_s": 90.0, "model": "older"}, last] if announced else []
    assert start_command("warmq", "warmq", seen, unknown="…") == command
    found = queue_stall("warmq", "warmq", 5, [], [], seen)
    assert found is not None
    assert f"`{command.replace('WARMQ_MODEL=… ', '')}` without" in found.advice()


@pytest.mark.parametrize("queue", ["warmq.nosuch", "warmq.tiny"])
def test_an_unserved_model_names_the_others_as_model_takes_them(queue: str) -> None:
    found = queue_stall(queue, "warmq", 5, [], OTHERS)
    assert found is not None
    assert found.detail == "workers serve: big, tiny (leave out --model)"
    far = queue_stall(queue, "warmq", 5, [], OTHERS[2:])
    assert far is not None
    assert far.detail == "workers serve: queue batches (of another WARMQ_QUEUE)"


def test_the_default_queue_is_not_called_a_model() -> None:
    of_name = {"queue": "warmq", "name": "tiny", "state": "starting"}
    found = queue_stall("warmq", "warmq", 5, [of_name], [of_name])
    assert found is not None
    assert "workers of tiny (queue warmq) are starting" in found.sentence()


@pytest.mark.parametrize(
    ("used", "limit", "code"),
    [(50, 100, None), (50, 0, None), (90, 100, "memory_high"), (100, 100, "memory_full")],
)
def test_redis_is_full_above_the_high_water_mark(used: int, limit: int, code: str | None) -> None:
    found = memory_stall(used, limit, 0.8)
    assert (found and found.code) == code
    if found:
        assert f"{used} %" in found.sentence()


def test_a_late_batch_names_by_how_much_and_the_slots_that_meet_its_deadline() -> None:
    found = late_stall("b1", LateBatch("part", "t", 7205.4, 64, 90))
    assert (found.code, found.passing) == ("deadline_late", True)
    assert "b1 will miss its deadline by about 2:00:05" in found.sentence()
    assert "90 slots instead of 64" in found.advice()


def test_a_deadline_that_no_number_of_slots_meets_names_none() -> None:
    found = late_stall("b1", LateBatch("part", "t", 0.3, 64, None))
    assert (found.code, found.passing, found.facts["needed"]) == ("deadline_late", True, None)
    assert "b1 will miss its deadline by about 0:00:01" in found.sentence()
    assert "more slots do not help" in found.advice()
    assert "None" not in found.advice()


@pytest.mark.parametrize(
    ("left_s", "swept", "said"),
    [
        (7.6, True, "for at most 0:00:08"),
        (0.2, True, "for at most 0:00:01"),
        (-3.0, True, "any moment"),
        (7.6, False, "wait until another worker runs"),
        (-3.0, False, "wait until another worker runs"),
    ],
)
def test_leases_of_a_dead_worker_say_when_their_requests_run_again(
    left_s: float, swept: bool, said: str
) -> None:
    found = lease_stall("warmq", LostLeases(2, left_s, {"celery@a.1.2"}, {}, swept))
    assert (found.code, found.passing) == ("lease_held", True)
    assert said in found.sentence()
    assert "0:00:00" not in found.sentence()
    assert ("warmq-worker" in found.advice()) is not swept


def submitted(**fields: object) -> Batch:
    return Batch("b1", {name: str(value) for name, value in fields.items()})


@pytest.mark.parametrize(
    ("batch", "stalled"),
    [
        (submitted(lines_at=1_000_000, cursor=2595), True),
        (submitted(lines_at=1_000_000, cursor=0), True),
        (submitted(lines_at=1_000_000 + int(STOPPED_S) * 1000, cursor=2595), False),
        (submitted(lines_at=1_000_000, cursor=2595, sealed=1), False),
        (submitted(lines_at=1_000_000, cursor=2595, cancelling=1), False),
        (submitted(cursor=2595), False),  # 0.2.0 submitted it: nobody knows when
    ],
)
def test_a_submit_that_got_no_line_for_a_while_has_stopped(batch: Batch, stalled: bool) -> None:
    found = submit_stall(batch, 1_000_000 + int(STOPPED_S * 1000) + 1)
    assert (found is not None) == stalled
    if found:
        assert found.facts["lines"] == batch.number("cursor")
        assert "fix the file if it was refused" in found.advice()
        assert "the same command with --batch-id b1 queues the missing lines" in found.advice()


def test_every_text_has_a_remedy_and_names_facts_only() -> None:
    facts = {
        "queue", "model", "waiting", "tenant", "cap", "percent", "batch", "lines", "quiet",
        "command", "count", "left", "late", "needed", "slots", "silent", "worker",
    }  # fmt: skip
    for text, remedy in TEXTS.values():
        assert text.format_map(dict.fromkeys(facts, 1))
        assert remedy.format_map(dict.fromkeys(facts, 1))
