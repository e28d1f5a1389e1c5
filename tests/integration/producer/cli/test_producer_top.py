"""`producer top`: the overview of the fleet, in a terminal."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from kit.commands.doctor_findings import announce
from kit.commands.support import finish, run_producer
from kit.protocol.lessee import QUEUE, Lessee, chat, client_of, submit_batch
from kit.stacks.celery_side import simulated

from contract.redis import keys
from contract.redis.batches import BatchStore
from contract.redis.history import Minute
from demo.stack import eventually
from producer.cli.commands.top import spark


def test_an_empty_fleet_says_what_to_do(redis_url: str) -> None:
    done = run_producer("top", redis_url=redis_url)
    assert done.returncode == 0
    assert "no worker is running: `producer doctor`" in done.stdout
    assert "0 of 0 slots in use, 0 requests wait, 0 workers\n" in done.stdout
    hour = next(line for line in done.stdout.splitlines() if "last hour" in line)
    assert hour.endswith("]")
    assert len(hour) <= 80


def test_workers_batches_and_what_waits_are_told(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    worker = simulated(redis_url, tmp_path / "worker.log", simulated_slots=4)
    worker.start()
    try:
        submit_batch(store, 12, batch_id="quick")
        eventually(lambda: (batch := store.batch("quick")) and batch.finished, 60)
        submit_batch(store, 5, batch_id="elsewhere", queue=f"{QUEUE}.unserved")
        done = run_producer("top", "--once", redis_url=redis_url)
    finally:
        worker.kill()
    assert done.returncode == 0, done.stderr
    assert "0 of 4 slots in use, 5 requests wait, 1 worker\n" in done.stdout
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line.split()}
    assert rows["quick"][1:5] == ["completed", "12", "12", "0"]
    assert rows["elsewhere"][1:5] == ["in_progress", "0", "5", "0"]


def test_cancelled_requests_are_not_done(redis_url: str, store: BatchStore) -> None:
    batch = submit_batch(store, 10, batch_id="batch_" + 32 * "a").batch
    lessee = Lessee(client_of(store))
    finish(lessee, lessee.pop(3))
    store.cancel(batch)
    done = run_producer("top", redis_url=redis_url)
    row = next(line.split() for line in done.stdout.splitlines() if line.startswith(batch.id))
    assert row[:5] == [batch.id, "cancelled", "3", "10", "0"]


def test_expired_requests_have_not_failed(redis_url: str, store: BatchStore) -> None:
    submit_batch(store, 10, batch_id="late")
    lessee = Lessee(client_of(store))
    lessee.done(*lessee.pop(10), outcome="expired")
    done = run_producer("top", redis_url=redis_url)
    row = next(line.split() for line in done.stdout.splitlines() if line.startswith("late"))
    assert row[:5] == ["late", "expired", "0", "10", "0"]


def test_a_running_batch_has_the_rate_of_the_last_seconds_and_the_text_says_so(
    redis_url: str, store: BatchStore
) -> None:
    submit_batch(store, 10, batch_id="b1")
    done = run_producer("top", redis_url=redis_url)
    row = next(line.split() for line in done.stdout.splitlines() if line.startswith("b1"))
    assert row[5] == "0.0"
    assert "of the last 2 s" in done.stdout.splitlines()[-1]


def test_one_look_at_a_busy_fleet_has_its_rates(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    worker = simulated(redis_url, tmp_path / "worker.log", simulated_slots=4)
    worker.start()
    try:
        bodies = [chat(f"q{n}", user="simulate:sleep=0.2") for n in range(1200)]
        submit_batch(store, batch_id="busy", bodies=bodies)
        eventually(lambda: (batch := store.batch("busy")) and batch.terminal, 60)
        done = run_producer("top", "--once", redis_url=redis_url)
    finally:
        worker.kill()
    assert done.returncode == 0, done.stderr
    head = done.stdout.splitlines()[0]
    assert float(head.split(" read, ")[1].split()[0]) > 0, head
    (row,) = (line.split() for line in done.stdout.splitlines() if line.startswith("busy"))
    assert row[1] == "in_progress"
    assert float(row[5]) > 0


def test_nothing_that_a_terminal_obeys_is_printed(redis_url: str, store: BatchStore) -> None:
    hostile = "w\x1b]0;owned\x07[bold]x"
    told = orjson.dumps({"queue": QUEUE, "state": hostile, "model": hostile, "slots": 1})
    store._client.hset(keys.WORKERS, hostile, b"%d\0" % store.now_ms() + told)
    done = run_producer("top", redis_url=redis_url)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout and "\x07" not in done.stdout
    assert "[bold]" in done.stdout


@pytest.mark.parametrize(("busy", "shown"), [(0, " "), (30, "▄"), (60, "█"), (90, "█")])
def test_a_minute_is_a_bar_as_high_as_its_slots_were_full(busy: int, shown: str) -> None:
    assert spark([Minute(1, busy_s=busy, slots_s=60)]) == shown
    assert spark([Minute(1)]) == " "


def test_what_the_last_requests_wait_for_stands_above_the_tables(
    redis_url: str, store: BatchStore
) -> None:
    announce(store)
    submit_batch(store, 2, batch_id="b1")
    Lessee(client_of(store), "celery@dead\x1b.7.1").pop(2)
    done = run_producer("top", "--once", redis_url=redis_url)
    assert done.returncode == 0, done.stderr
    text, _, tables = " ".join(done.stdout.split()).partition("WORKER STATE")
    assert "a worker has died: its 2 requests of queue warmq wait" in text
    assert "celery@dead?.7.1" in text
    assert "nothing is lost" in text
    assert "in_progress 0 2 0" in tables
