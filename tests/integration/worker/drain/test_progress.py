"""The lines that say how a worker's work goes on."""

from __future__ import annotations

import logging
import re

import pytest
import redis
from kit.drain.draining import LONG, Draining, draining, send, soon
from kit.protocol.lessee import QUEUE, chat, submit_batch

from contract.redis.batches import BatchStore
from contract.redis.history import HistoryReads
from worker.drain import progress
from worker.drain.progress import Progress

LINE = re.compile(
    r"([\d,]+) answered in [\d.]+ s: ([\d.,]+) a second, ([\d,]+) tokens a second written, "
    r"([\d,]+) read(; \d+ failed or cancelled)?; (.+)"
)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Two lines may follow each other at once."""
    monkeypatch.setattr(progress, "LEAST_S", 0.0)
    caplog.set_level(logging.INFO, progress.__name__)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == progress.__name__]


async def idle(running: Draining, ended: int) -> None:
    """Wait until so many have ended and the queue was found empty."""
    drain = running.drain
    await soon(lambda: drain.counts.ended == ended and drain.wakeup.queue_empty.is_set())
    assert not drain.in_flight


async def test_an_emptied_queue_is_told_once_with_what_was_done(
    redis_client: redis.Redis, redis_url: str, store: BatchStore, caplog: pytest.LogCaptureFixture
) -> None:
    async with draining(redis_url, side_tasks=False) as running:
        progress = Progress(running.drain)
        submit_batch(store, 30)
        await idle(running, 30)
        for _ in range(5):
            await progress.log_if_due()
        (line,) = told(caplog)
        # And again after more work
        send(redis_client, chat("one more"))
        await idle(running, 31)
        for _ in range(5):
            await progress.log_if_due()
    found = LINE.fullmatch(line)
    assert found is not None, line
    assert int(found[1]) == 30
    assert all(float(found[n].replace(",", "")) > 0 for n in (2, 3, 4))
    assert found[5] is None
    assert found[6] == "the queue is empty"
    assert told(caplog)[1].startswith("1 answered in ")
    assert len(told(caplog)) == 2


async def test_a_long_run_is_told_of_every_so_often(
    redis_client: redis.Redis,
    redis_url: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with draining(redis_url, side_tasks=False, look_ahead=0) as running:
        told_of = Progress(running.drain)
        send(redis_client, *[chat(f"{n}", user=LONG) for n in range(20)])
        await soon(lambda: len(running.drain.in_flight) == 4)
        await told_of.log_if_due()
        assert told(caplog) == []  # it is not time yet
        monkeypatch.setattr(progress, "EVERY_S", 0.0)
        for _ in range(3):
            await told_of.log_if_due()
    assert len(told(caplog)) == 3
    for line in told(caplog):
        found = LINE.fullmatch(line)
        assert found is not None, line
        assert (found[1], found[6]) == ("0", "4 in flight, 16 waiting")


async def test_a_queue_that_gets_empty_again_and_again_is_not_told_of_each_time(
    redis_client: redis.Redis,
    redis_url: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "LEAST_S", 600.0)
    async with draining(redis_url, side_tasks=False) as running:
        told_of = Progress(running.drain)
        for n in range(1, 6):
            redis_client.delete("celery-task-meta-t0")
            send(redis_client, chat(f"{n}"))
            await idle(running, n)
            await told_of.log_if_due()
            await told_of.log_if_due()
    assert len(told(caplog)) == 1


async def test_failed_requests_are_counted_apart(
    redis_client: redis.Redis, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with draining(redis_url, side_tasks=False) as running:
        told_of = Progress(running.drain)
        send(redis_client, chat("a"), chat("b", user="simulate:fail"))
        await idle(running, 2)
        await told_of.log_if_due()
        await told_of.log_if_due()
    (line,) = told(caplog)
    assert line.startswith("1 answered in ")
    assert line.endswith("; 1 failed or cancelled; the queue is empty")


async def test_a_worker_with_nothing_to_do_says_nothing(
    redis_client: redis.Redis, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with draining(redis_url, side_tasks=False) as running:
        told_of = Progress(running.drain)
        await idle(running, 0)
        for _ in range(10):
            await told_of.log_if_due()
    assert told(caplog) == []


async def test_the_last_seconds_of_a_stay_are_in_the_queues_history(
    redis_url: str, store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "WRITE_S", 3600.0)
    async with draining(redis_url) as running:
        submit_batch(store, 5)
        await idle(running, 5)
        running.drain.stop()
        await running.ended()
    minutes = HistoryReads.using(store).day([QUEUE], 3)
    assert sum(minute.completed for minute in minutes) == 5
