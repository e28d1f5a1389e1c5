"""What a producer is told of the workers while nothing moves."""

from __future__ import annotations

import subprocess

import orjson
import pytest
from kit.commands.support import producer_command, producer_env, run_producer
from kit.protocol.lessee import client_of, submit_batch

from contract.redis import keys
from contract.redis.batches import BatchStore
from producer import queue_workers
from producer.queue_workers import QueueWorkers


def announce(store: BatchStore, worker: str, state: str, silent_s: float = 0, **more: str) -> None:
    """Leave what a worker said of itself so many seconds ago."""
    seconds, _ = client_of(store).time()
    record = b"%d\0" % ((seconds - silent_s) * 1000)
    told = {"state": state, "queue": "warmq"} | more
    client_of(store).hset(keys.WORKERS, worker, record + orjson.dumps(told))


@pytest.fixture
def workers(store: BatchStore) -> QueueWorkers:
    return QueueWorkers(store, "warmq")


def test_without_any_worker_nothing_more_is_known(workers: QueueWorkers):
    assert workers.text() == "no worker serves queue warmq"


def test_living_workers_are_told_with_their_states(store: BatchStore, workers: QueueWorkers):
    announce(store, "celery@a.12.0a1b2c3d", "ready")
    announce(store, "celery@b.c.13.0a1b2c3e", "starting")
    assert workers.text() in ("workers: ready, starting", "workers: starting, ready")


def test_a_worker_that_has_just_fallen_silent_is_told_by_name(
    store: BatchStore, workers: QueueWorkers
):
    announce(store, "celery@b.c.13.0a1b2c3e", "starting", silent_s=8)
    text = workers.text()
    assert text.startswith("workers: starting (celery@b.c (process 13) was last heard 0:00:0")


def test_why_a_worker_runs_nothing_is_told(store: BatchStore, workers: QueueWorkers):
    announce(store, "celery@b.c.13.0a1b2c3e", "starting", why="waits for a:8000: no route to host")
    assert workers.text() == "workers: starting (waits for a:8000: no route to host)"
    announce(store, "celery@b.c.13.0a1b2c3e", "starting", silent_s=8, why="loading the model")
    assert workers.text().startswith("workers: starting (loading the model; celery@b.c (process 13")


def test_a_worker_that_ended_because_it_failed_is_not_alive_and_its_reason_is_told(
    store: BatchStore, workers: QueueWorkers
):
    announce(store, "celery@a.12.0a1b2c3d", "stopped", why="the engine failed to start: no\x1b GPU")
    text = workers.text()
    assert text.startswith("no worker serves queue warmq any more: the last one, celery@a (process")
    assert text.endswith("(stopped: the engine failed to start: no  GPU); its log says why")
    assert store.workers("warmq") == []


def test_a_reason_is_shown_in_part_if_it_is_long(store: BatchStore, workers: QueueWorkers):
    announce(store, "celery@a.12.0a1b2c3d", "starting", why="x" * 10_000)
    assert len(workers.text()) < 400


def test_of_dead_workers_the_last_is_told_with_where_its_last_words_are(
    store: BatchStore, workers: QueueWorkers
):
    announce(store, "celery@a.12.0a1b2c3d", "ready", silent_s=300)
    announce(store, "celery@b.c.13.0a1b2c3e", "starting", silent_s=42)
    text = workers.text()
    assert text.startswith("no worker serves queue warmq any more: the last one, celery@b.c ")
    assert "(process 13), was heard 0:00:4" in text
    assert text.endswith("ago (starting); its log says why")


def test_a_worker_whose_announcement_was_swept_is_remembered(
    store: BatchStore, workers: QueueWorkers, monkeypatch
):
    now = 1000.0
    monkeypatch.setattr(queue_workers.time, "monotonic", lambda: now)
    announce(store, "celery@a.12.0a1b2c3d", "starting")
    workers.text()
    client_of(store).delete(keys.WORKERS)
    now += 75
    text = workers.text()
    assert "celery@a (process 12), was heard 0:01:1" in text
    assert "(starting); its log says why" in text


def test_who_watches_a_batch_of_a_dead_worker_is_told_so(redis_url: str, store: BatchStore):
    submit_batch(store, 2)
    announce(store, "celery@a.12.0a1b2c3d", "starting", silent_s=100)
    with subprocess.Popen(
        producer_command("watch", "b1"), env=producer_env(redis_url),
        stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stderr
        told = process.stderr.readline()
        process.kill()
        process.stderr.close()
    assert "0/2 done" in told
    assert "no worker serves queue warmq any more: the last one, celery@a (process 12)" in told


def test_the_text_of_a_request_whose_worker_died_is_waited_for_with_a_word(
    redis_url: str, store: BatchStore
):
    submit_batch(store, 2)
    announce(store, "celery@a.12.0a1b2c3d", "ready", silent_s=100)
    with subprocess.Popen(
        producer_command("watch", "b1", "--request", "c1", "--stream"),
        env=producer_env(redis_url), stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stderr
        told = process.stderr.readline()
        process.kill()
        process.stderr.close()
    assert "c1 waits; no worker serves queue warmq any more" in told


def test_the_state_of_an_unfinished_batch_tells_of_the_workers(redis_url: str, store: BatchStore):
    submit_batch(store, 2)
    announce(store, "celery@a.12.0a1b2c3d", "starting", silent_s=100)
    shown = run_producer("status", "b1", redis_url=redis_url).stdout
    assert "workers   no worker serves queue warmq any more: the last one, celery@a" in shown


def test_who_follows_results_that_do_not_come_is_told_of_the_workers(
    redis_url: str, store: BatchStore
):
    submit_batch(store, 2)
    announce(store, "celery@a.12.0a1b2c3d", "ready", silent_s=100)
    with subprocess.Popen(
        producer_command("results", "b1", "--follow"), env=producer_env(redis_url),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stderr
        told = process.stderr.readline()
        process.kill()
    assert "b1: 0 results, 0 failed; waiting, no worker serves queue warmq any more" in told
