"""Time left: tokens left, and those of others before, by the tokens of the last minutes."""

from __future__ import annotations

from typing import Any

import pytest

from contract.batch import Batch
from contract.naming import turn_list
from contract.redis.pace import Pace
from contract.redis.waiting import WaitingList
from producer.time_left import Outlook, OutlookReads, Work, requests_before, seconds_left


@pytest.mark.parametrize(
    ("left", "done", "tokens", "seconds"),
    [
        (100, 10, 400, 100.0),  # 100 requests of 40 tokens, by 40 a second
        (2, 10, 400, 4.0),  # 2 requests use 2 of the 4 slots
        (0, 10, 400, None),  # nothing is left
        (10, 0, 0, 25.0),  # as the queue's requests, of 100 tokens
        (5, 5, 0, None),  # no server reports usage
    ],
)
def test_the_rest_takes_as_the_requests_that_are_done(
    left: int, done: int, tokens: int, seconds: float | None
) -> None:
    outlook = Outlook(Pace(10.0, 4, 100.0 if not done else 0.0))
    assert outlook.seconds_left(Work("b", "t", 6, left, done, tokens)) == seconds


WORK = Work("b", "t", 6, 100)


@pytest.mark.parametrize(
    ("lists", "before"),
    [
        ([], 0),
        ([WaitingList(6, "t", "b", 90)], 0),  # its own
        ([WaitingList(3, "u", "x", 70)], 70),  # of a higher priority
        ([WaitingList(9, "u", "x", 70)], 0),
        ([WaitingList(6, "t", "x", 70)], 70),  # the same tenant's, in turns
        ([WaitingList(6, "t", "x", 5000)], 100),
        ([WaitingList(6, "t", "x", 5000), WaitingList(6, "t", "y", 40)], 140),
        ([WaitingList(6, "u", "x", 5000)], 100),  # another tenant's, in turns
        ([WaitingList(6, "u", "x", 60), WaitingList(6, "u", "y", 5000)], 100),
        ([WaitingList(6, "t", "x", 100), WaitingList(6, "u", "y", 5000)], 300),
        ([WaitingList(0, "", "", 7)], 7),  # a plain Celery client's
    ],
)
def test_what_waits_before_is_what_the_turns_serve_meanwhile(
    lists: list[WaitingList], before: int
) -> None:
    assert requests_before(lists, WORK) == before


def test_a_batch_that_is_not_queued_yet_has_no_list() -> None:
    assert requests_before([WaitingList(6, "t", "", 70)], WORK._replace(batch_id=None)) == 70


@pytest.mark.parametrize("fifo", [False, True])
def test_a_batch_knows_its_place(fifo: bool) -> None:
    fields = {"list": turn_list("warmq.x", 3, "t", "" if fifo else "b1"), "tenant": "t"}
    batch = Batch("b1", fields | {"total": "10", "completed": "4", "prompt_tokens": "80"})
    assert Work.of(batch) == Work("" if fifo else "b1", "t", 3, 6, 4, 80)
    # Its own requests in the tenant's list are not before it; others there may be.
    lists = [WaitingList(3, "t", "" if fifo else "b1", 6)]
    assert requests_before(lists, Work.of(batch)) == 0


def test_two_batches_that_take_turns_need_twice_the_time() -> None:
    pace = Pace(10.0, 4, 40.0)
    work = Work("b", "t", 6, 100, 10, 400)
    assert Outlook(pace).seconds_left(work) == 100.0
    other = WaitingList(6, "t", "x", 5000)
    assert Outlook(pace, [other]).seconds_left(work) == 200.0


def test_after_a_retry_the_queue_s_last_minutes_count() -> None:
    fields = {"total": "5000", "completed": "2", "prompt_tokens": "90000", "retried": "4998"}
    work = Work.of(Batch("b1", fields))
    assert (work.left, work.done, work.tokens) == (4998, 0, 0)


def test_a_run_whose_queued_requests_have_ended_has_no_time_left() -> None:
    fields = {"total": "50", "completed": "50", "windows": "1", "unread": "900", "tokens": "9"}
    work = Work.of(Batch("run_1", fields))
    assert work.left == 0
    assert Outlook(Pace(10.0, 4, 40.0)).seconds_left(work) is None
    assert Work.of(Batch("run_1", fields | {"completed": "49"})).left == 901


def test_a_batch_in_several_queues_has_its_time_left_in_each() -> None:
    fields = {"list": turn_list("warmq", 3, "t", "b1"), "tenant": "t", "total": "90"}
    batch = Batch("b1", fields | {"queue": "warmq", "queues": "warmq.a\nwarmq.b"})
    assert batch.queues == ["warmq.a", "warmq.b"]
    work, pace = Work.of(batch), Pace(10.0, 4, 40.0)
    own, other = WaitingList(3, "t", "b1", 30), WaitingList(3, "t", "b2", 30)
    assert Outlook(pace, [own]).seconds_left(work) == 30.0
    assert Outlook(pace, [own, other]).seconds_left(work) == 60.0
    assert Outlook(pace, [other]).seconds_left(work) == 0.0


def test_a_model_that_is_not_loaded_is_loaded_first() -> None:
    work = Work("b", "t", 6, 100, 10, 400)
    assert Outlook(Pace(10.0, 4, 40.0), load_s=12.0).seconds_left(work) == 112.0
    assert Outlook(Pace(10.0, 4, 40.0), load_s=12.0).seconds_left(work._replace(left=0)) is None


def test_a_capped_tenant_has_the_time_of_its_slots() -> None:
    pace, work = Pace(10.0, 4, 40.0), Work("b", "t", 6, 100, 10, 400)
    assert Outlook(pace, caps={"t": 2}).seconds_left(work) == 200.0
    assert Outlook(pace, caps={"t": 9}).seconds_left(work) == 100.0
    assert Outlook(pace, caps={"u": 2}).seconds_left(work) == 100.0
    assert Outlook(pace, caps={"t": 0}).seconds_left(work) is None
    # Its own requests before wait for its slots, those of other tenants do not.
    above, other = WaitingList(3, "t", "x", 100), WaitingList(3, "u", "y", 100)
    assert Outlook(pace, [above], caps={"t": 2}).seconds_left(work) == 400.0
    assert Outlook(pace, [other], caps={"t": 2}).seconds_left(work) == 200.0


def test_requests_of_a_dead_worker_end_after_its_leases() -> None:
    held = {(6, "t", "b"): 30.0}
    outlook, work = Outlook(Pace(10.0, 4, 40.0), held=held), Work("b", "t", 6, 2, 10, 400)
    assert outlook.seconds_left(work) == 34.0  # then a request of 4 s
    assert outlook.seconds_left(work._replace(left=1000)) == 1000.0
    assert outlook.seconds_left(work._replace(batch_id="c")) == 4.0
    several = work._replace(several=True)  # in flight, and nothing waits
    assert outlook.seconds_left(several) == 34.0


def test_silent_workers_have_no_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    def outlook_of(_: OutlookReads, queues: list[str], workers: list[Any]) -> list[str]:
        return [one["id"] for one in workers]

    ages = {"a": 0, "b": 5, "c": 20}
    announced = [
        {"id": n, "queue": "warmq", "silent_s": age, "overdue": age > 2} for n, age in ages.items()
    ]
    monkeypatch.setattr(OutlookReads, "outlook_of", outlook_of)
    monkeypatch.setattr(OutlookReads, "announcements", lambda _: announced)
    assert OutlookReads.__new__(OutlookReads).outlooks(["warmq", "x"]) == {"warmq": ["a"], "x": []}
    # While Redis was away, no worker could announce itself
    announced = [one | {"redis_up_s": 4.0} for one in announced]
    assert OutlookReads.__new__(OutlookReads).outlooks(["warmq"]) == {"warmq": ["a", "b", "c"]}


def test_queues_with_the_same_workers_wait_for_each_other() -> None:
    pace, work = Pace(10.0, 4, 40.0), Work("b", "t", 6, 100, 10, 400)
    one, other = (Outlook(pace, workers=frozenset(name)) for name in "ab")
    works = {"x": [work, work._replace(left=0)], "y": [work._replace(left=50)]}
    assert seconds_left(works, {"x": one, "y": one}) == 150.0
    assert seconds_left(works, {"x": one, "y": other}) == 100.0
    assert seconds_left(works, {"x": one, "y": None}) is None
    assert seconds_left({"x": [work._replace(left=0)]}, {"x": one}) is None


@pytest.mark.parametrize(
    ("requests", "slots", "seconds"),
    [
        (25, 64, None),  # two `producer try`: not even each slot had a request
        (30, 64, 6.25),
        (25, 25, 16.0),  # slow requests, few of which end in five minutes
        (None, 64, 6.25),
    ],
)
def test_a_pace_of_too_few_requests_gives_no_time_left(
    requests: int | None, slots: int, seconds: float | None
) -> None:
    outlook = Outlook(Pace(10.0, slots, 40.0, requests))
    assert outlook.seconds_left(WORK) == seconds
