"""The last day of each queue and hour of each worker, in Redis: what workers did, in few bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import redis
from kit.protocol.lessee import QUEUE, submit_batch
from kit.stacks.celery_side import simulated

from contract.redis.batches import BatchStore
from contract.redis.history import DAY, HOUR, HistoryReads, Minute
from contract.redis.reads import Reads
from contract.redis.scripts import source
from demo.stack import eventually

#: More than any worker does in ten seconds.
MUCH = 2**52
KEY = f"warmq:ring:{QUEUE}"
#: Bytes of a queue's full ring in Redis, with all that Redis itself takes for it.
MOST_BYTES = 400_000


def note(client: redis.Redis, *numbers: int, worker: str = "w1") -> int:
    return int(client.eval(source("ring"), 0, QUEUE, worker, *numbers))


def test_two_workers_minutes_are_one_minute_of_their_queue(
    redis_client: redis.Redis, store: BatchStore
) -> None:
    first = note(redis_client, 3, 1, 30, 60, 5, 8, 10)
    second = note(redis_client, 1, 0, 10, 20, 0, 4, 10, worker="w2")
    reads = HistoryReads.using(store)
    found = [minute for minute in reads.day([QUEUE], 3) if minute.completed]
    sums = found[0] if first == second else found[0].plus(found[1])
    assert sums[1:] == (4, 1, 40, 80, 5, 12, 20)
    assert sums.fill == 12 / 20
    hours = reads.hours(["w1", "w2", "nobody"])
    assert [sum(m.completion_tokens for m in hours[w]) for w in hours] == [60, 20, 0]
    assert {len(minutes) for minutes in hours.values()} == {HOUR}


def test_a_minute_of_the_day_before_is_not_added_to_and_not_read(
    redis_client: redis.Redis, store: BatchStore
) -> None:
    now = store.now_ms() // 60_000
    for minute in range(now - 1, now + 3):  # also if a minute ends meanwhile
        old = f"{minute - DAY} 7 7 7 7 7 7 7"
        redis_client.hset(KEY, minute % DAY, old)
    assert all(m[1:] == Minute(0)[1:] for m in HistoryReads.using(store).day([QUEUE], 2))
    note(redis_client, 1, 2, 3, 4, 5, 6, 7)
    (found,) = [m for m in HistoryReads.using(store).day([QUEUE], 3) if m.completed]
    assert found[1:] == (1, 2, 3, 4, 5, 6, 7)


def test_a_full_ring_is_small_however_much_was_done(
    redis_client: redis.Redis, store: BatchStore
) -> None:
    note(redis_client, *[MUCH] * 7)
    note(redis_client, *[MUCH] * 7)  # sums stop where numbers are no longer exact
    (longest,) = {len(value) for value in redis_client.hvals(KEY)}
    now = store.now_ms() // 60_000
    with redis_client.pipeline(transaction=False) as pipe:
        for minute in range(now, now + 2 * DAY):  # a day and another: none has a place of its own
            pipe.hset(KEY, minute % DAY, "9" * longest)
        pipe.execute()
    assert redis_client.hlen(KEY) == DAY
    assert redis_client.memory_usage(KEY, samples=0) < MOST_BYTES
    assert 0 < redis_client.pttl(KEY) <= (DAY + 5) * 60_000
    own = "warmq:ring-of:w1"
    assert redis_client.memory_usage(own, samples=0) < MOST_BYTES / DAY * HOUR
    assert 0 < redis_client.pttl(own) <= (HOUR + 5) * 60_000


def test_what_another_program_wrote_there_is_passed_over(
    redis_client: redis.Redis, store: BatchStore
) -> None:
    now = store.now_ms() // 60_000
    for at, text in enumerate(("", "x", "1 2", f"{now} -1 0 0 0 0 0 0", "\xff", f"{now}")):
        redis_client.hset(KEY, (now - at) % DAY, text)
    assert all(m[1:] == Minute(0)[1:] for m in HistoryReads.using(store).day([QUEUE], 10))


def test_a_worker_writes_what_it_did_and_announces_its_totals(
    redis_url: str, redis_client: redis.Redis, store: BatchStore, tmp_path: Path
) -> None:
    submit_batch(store, 40)
    worker = simulated(redis_url, tmp_path / "worker.log", simulated_slots=4)
    worker.start()
    try:
        reads = HistoryReads.using(store)

        def done() -> bool:
            return sum(minute.completed for minute in reads.day([QUEUE], HOUR)) == 40

        eventually(done, 60, "the ring has what the worker did")
        minutes = reads.day([QUEUE], HOUR)
        assert sum(minute.slots_s for minute in minutes) > 0
        assert all(minute.busy_s <= minute.slots_s for minute in minutes)

        def told() -> dict[str, Any] | None:
            (one,) = Reads.using(store).announcements(QUEUE)
            return one if one["done"]["completed"] == 40 else None

        announced = eventually(told, 10, "the announcement, which may come after the history")
        assert announced is not None
        written = sum(minute.completion_tokens for minute in minutes)
        assert announced["done"]["completion_tokens"] == written
        assert announced["deaths"] == 0
    finally:
        worker.kill()


def test_front_ends_of_a_worker_write_one_hour_and_announce_one_total(
    redis_url: str, redis_client: redis.Redis, store: BatchStore, tmp_path: Path
) -> None:
    submit_batch(store, 40)
    settings = {"simulated_slots": 4, "simulated_latency_s": 0.05, "look_ahead": 0}
    with simulated(redis_url, tmp_path / "worker.log", front_ends=2, **settings):
        reads = HistoryReads.using(store)

        def done() -> bool:
            return sum(minute.completed for minute in reads.day([QUEUE], HOUR)) == 40

        eventually(done, 60, "the ring has what the worker did")

        def told() -> dict[str, Any]:
            (worker,) = Reads.using(store).announcements(QUEUE)
            return worker

        eventually(lambda: told()["done"]["completed"] == 40, 20, "both parts have told it")
        worker = told()
        assert worker["deaths"] == 0
        (own,) = redis_client.scan_iter("warmq:ring-of:*", count=1000)
        assert own.decode() == f"warmq:ring-of:{worker['id']}"
        (hour,) = reads.hours([worker["id"]]).values()
        assert sum(minute.completed for minute in hour) == 40
