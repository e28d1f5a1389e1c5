"""Celery's events of a real worker process, as Celery's own receiver reads them."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
import redis
from celery import Celery
from kit.stacks.celery_side import client_app, in_flight, send, simulated
from kit.stacks.event_reader import EventReader

from contract.naming import TASK_NAME
from demo.stack import Worker, eventually

SECRET = "nobody else's business"
BODY = {"prompt": SECRET, "max_tokens": 4}


class Telling(Worker):
    """A worker that is started with `-E`."""

    def command(self) -> list[str]:
        return [*super().command(), "-E"]


@pytest.fixture
def app(redis_url: str) -> Iterator[Celery]:
    with client_app(redis_url) as client:
        yield client


def asked_for(app: Celery) -> None:
    """Ask for task events, as Flower does."""
    (reply,) = app.control.enable_events(reply=True, timeout=20, limit=1)
    assert "ok" in next(iter(reply.values()))


def answered(app: Celery, reader: EventReader, count: int) -> list[str]:
    """Send requests, and return their ids once their events have come."""
    sent = [send(app, BODY) for _ in range(count)]
    for one in sent:
        eventually(
            lambda one=one: reader.kinds(one.id)[-1:] == ["succeeded"], 30, "its end is told"
        )
    return [one.id for one in sent]


def unpacked(message: bytes) -> list[dict[str, object]]:
    """Return the events of one message as Redis carries it."""
    return orjson.loads(base64.b64decode(orjson.loads(message)["body"]))


def ready(app: Celery) -> bool:
    replies = app.control.inspect(timeout=2, limit=1).stats() or {}
    return any(told["warmq"]["state"] == "ready" for told in replies.values())


@pytest.mark.parametrize("front_ends", [1, 2])
def test_whoever_asks_for_events_is_told_what_happens_to_each_request_as_of_one_worker(
    redis_url: str, tmp_path: Path, app: Celery, front_ends: int
) -> None:
    worker = simulated(
        redis_url, tmp_path / "log", front_ends=front_ends, simulated_latency_s=0.05, look_ahead=0,
        simulated_slots=4,
    )  # fmt: skip
    with worker, EventReader(app) as reader:
        eventually(lambda: ready(app), 30, "the worker is ready")
        asked_for(app)
        # The front ends hear of it twice a second: until then requests run untold.
        eventually(lambda: send(app, BODY) and reader.of_requests(), 30, "events", 0.1)
        ids = answered(app, reader, 40)
        for request_id in ids:
            assert reader.kinds(request_id) == ["received", "started", "succeeded"]
        told = [event for one in ids for event in reader.of_requests()[one]]
        assert len({event["hostname"] for event in told}) == 1
        task = reader.state.tasks[ids[0]]
        assert (task.name, task.state) == (TASK_NAME, "SUCCESS")
        assert task.runtime > 0
        assert SECRET not in repr(reader.of_requests())


def test_events_go_out_in_groups_and_not_one_by_one(
    redis_url: str, redis_client: redis.Redis, tmp_path: Path, app: Celery
) -> None:
    with (
        Telling(redis_url, tmp_path / "log", engine="simulated", simulated_latency_s=0),
        redis_client.pubsub() as heard,
    ):
        eventually(lambda: ready(app), 30, "the worker is ready")
        heard.psubscribe("*celeryev/task.*")
        eventually(heard.get_message, 10, "it is subscribed")
        for answer in [send(app, BODY) for _ in range(100)]:
            eventually(answer.ready, 30, "it has ended")
        messages: list[bytes] = []

        def whole() -> bool:
            while message := heard.get_message(ignore_subscribe_messages=True):
                messages.append(message["channel"])
                events.extend(unpacked(message["data"]))
            return [event["type"] for event in events].count("task-succeeded") == 100

        events: list[dict[str, object]] = []
        eventually(whole, 30, "all is told")
        assert {channel.rpartition(b"/")[2] for channel in messages} == {b"task.multi"}
        assert len(messages) < len(events)


def test_a_failure_and_a_revocation_are_told_with_their_reason(
    redis_url: str, tmp_path: Path, app: Celery
) -> None:
    with (
        Telling(redis_url, tmp_path / "log", engine="simulated", simulated_latency_s=600),
        EventReader(app) as reader,
    ):
        eventually(lambda: ready(app), 30, "the worker is ready")
        wrong = send(app, BODY | {"temperature": 9})
        eventually(lambda: "failed" in reader.kinds(wrong.id), 30, "the failure is told")
        # celery-exporter takes its label from the name before the bracket.
        exception = reader.of_requests()[wrong.id][-1]["exception"]
        assert re.match(r"RequestRejected\('.*temperature.*'\)$", exception)
        running = send(app, BODY)
        eventually(lambda: in_flight(app) == {running.id}, 30, "it runs")
        app.control.revoke(running.id)
        eventually(lambda: "revoked" in reader.kinds(running.id), 30, "the revocation is told")
        assert reader.of_requests()[running.id][-1]["terminated"] is True


def test_a_request_that_goes_back_to_the_queue_is_told_as_retried(
    redis_url: str, tmp_path: Path, app: Celery
) -> None:
    worker = Telling(redis_url, tmp_path / "log", engine="simulated", simulated_latency_s=600,
                     drain_timeout_s=0)  # fmt: skip
    with worker, EventReader(app) as reader:
        eventually(lambda: ready(app), 30, "the worker is ready")
        running = send(app, BODY)
        eventually(lambda: "started" in reader.kinds(running.id), 30, "it runs")
        worker.stop()
        assert reader.kinds(running.id)[:2] == ["received", "started"]
        with Telling(redis_url, tmp_path / "log", engine="simulated", simulated_latency_s=0):
            eventually(lambda: "succeeded" in reader.kinds(running.id), 30, "it has ended")
        assert reader.of_requests()[running.id][-3]["retries"] == 1


def test_nothing_is_told_of_requests_before_it_is_asked_for_nor_after(
    redis_url: str, tmp_path: Path, app: Celery
) -> None:
    with simulated(redis_url, tmp_path / "log"), EventReader(app) as reader:
        eventually(lambda: ready(app), 30, "the worker is ready")
        before = send(app, BODY)
        eventually(before.ready, 30, "it has ended")
        asked_for(app)
        eventually(lambda: send(app, BODY) and reader.of_requests(), 30, "events", 0.1)
        app.control.disable_events(reply=True, timeout=20, limit=1)
        beats = len(reader.of_workers("worker-heartbeat"))
        last = send(app, BODY)
        eventually(last.ready, 30, "it has ended")
        eventually(
            lambda: len(reader.of_workers("worker-heartbeat")) > beats + 1, 30, "two heartbeats"
        )
        assert before.id not in reader.of_requests()
        told = len(reader.of_requests())
        after = send(app, BODY)
        eventually(after.ready, 30, "it has ended")
        assert after.id not in reader.of_requests()
        assert len(reader.of_requests()) == told


def test_heartbeats_and_stats_count_what_runs_and_what_has_ended(
    redis_url: str, tmp_path: Path, app: Celery
) -> None:
    with (
        simulated(redis_url, tmp_path / "log", simulated_latency_s=0.01) as worker,
        EventReader(app) as reader,
    ):
        sent = [send(app, BODY) for _ in range(7)]
        for one in sent:
            eventually(one.ready, 30, "it has ended")
        eventually(
            lambda: reader.of_workers("worker-heartbeat")[-1]["processed"] == 7, 30, "all counted"
        )
        (stats,) = app.control.inspect(timeout=5, limit=1).stats().values()
        assert stats["total"] == {TASK_NAME: 7}
        # What celery-exporter reads of `stats`, and of `active_queues`.
        assert stats["pool"]["processes"] == [worker.pid]
        (queues,) = app.control.inspect(timeout=5, limit=1).active_queues().values()
        assert [queue["name"] for queue in queues] == ["warmq-control"]
    with (
        simulated(
            redis_url, tmp_path / "log", simulated_latency_s=600, drain_timeout_s=0
        ) as worker,
        EventReader(app) as reader,
    ):
        sent = [send(app, BODY) for _ in range(3)]
        eventually(lambda: in_flight(app) == {one.id for one in sent}, 30, "they run")
        eventually(
            lambda: reader.of_workers("worker-heartbeat")[-1]["active"] == 3, 30, "all counted"
        )
        worker.stop()
        eventually(lambda: reader.of_workers("worker-offline"), 30, "the worker says that it goes")
