"""A worker whose next announcement is overdue: `doctor` and `top` do not call it ready."""

from __future__ import annotations

import re

import pytest
from kit.commands.doctor_findings import announce, doctor
from kit.commands.support import run_producer

from contract.redis.batches import BatchStore
from contract.settings import Settings
from demo.stack import RedisServer
from producer.cli.doctor import work


def test_doctor_has_the_age_of_its_announcement(own: RedisServer, own_store: BatchStore) -> None:
    announce(own_store, "celery@a.1.0", silent_s=4)
    announce(own_store, "celery@b.2.0", limit=0)  # it has just become ready
    found = doctor(own.url, 0)
    assert "celery@b.2.0: ready, 3 in flight" in found["worker"]["text"]
    queue = "warmq: 0 waiting, 6 in flight when last seen, workers: 1, 1 not seen lately"
    assert found["queue"]["text"] == queue
    text = found["worker_silent"]["text"]
    assert re.match(r"celery@a.1.0 last announced itself 0:00:[01]\d ago \(ready", text)


@pytest.mark.parametrize("ages", [(0, 4, 21), (4, 12, 29), (0, 0, 40)])
def test_doctor_counts_the_workers_that_it_lists_as_not_seen(
    store: BatchStore, ages: tuple[int, ...]
) -> None:
    announced = [
        {"id": f"w{age}", "queue": "warmq", "state": "ready", "silent_s": age, "overdue": age > 2}
        for age in ages
    ]
    announced.append(announced[-1] | {"id": "s", "state": "stopped"})
    codes = [finding.code for each in announced for finding in work._worker(each)]
    (queue, *_) = work._queues(store, Settings(), announced, [])
    unseen = codes.count("worker_silent")
    assert unseen == sum(age > 2 for age in ages)
    assert queue.text.endswith(f"workers: {3 - unseen}, {unseen} not seen lately")


def test_top_has_the_age_of_its_announcement(redis_url: str, store: BatchStore) -> None:
    announce(store, "celery@a.1.0", silent_s=4, slots=64, in_flight=64)
    lines = run_producer("top", redis_url=redis_url).stdout.splitlines()
    (row,) = (line for line in lines if line.startswith("celery@a.1.0"))
    assert "seen 0:00:" in row
    assert "0 / 64" in row
    assert "ready" not in row


def test_top_counts_the_slots_of_workers_that_were_seen_lately(
    redis_url: str, store: BatchStore
) -> None:
    announce(store, "celery@a.1.0", silent_s=4, slots=64, in_flight=64)
    announce(store, "celery@b.2.0", slots=64, in_flight=3)
    head = run_producer("top", redis_url=redis_url).stdout.splitlines()[1]
    assert head == "3 of 64 slots in use, 0 requests wait, 1 worker, 1 not seen lately"
