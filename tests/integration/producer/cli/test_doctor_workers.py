"""`producer doctor` on workers, queues, batches and dead letters."""

from __future__ import annotations

import re

import orjson
import pytest
from kit.commands.doctor_findings import announce, doctor, levels
from kit.protocol.lessee import Lessee, celery_message, client_of, submit_batch

from contract.naming import DEFAULT_QUEUE
from contract.redis import keys
from contract.redis.batches import BatchStore
from contract.version import version
from demo.stack import RedisServer


def test_without_a_worker_nothing_runs(own: RedisServer) -> None:
    assert levels(doctor(own.url, 1), "problem") == {"no_worker"}


def test_workers_that_do_not_run_requests_are_told(own: RedisServer, own_store: BatchStore) -> None:
    announce(own_store, "celery@a.1.0", state="starting", why="waits for http://10.0.0.9/v1")
    announce(own_store, "celery@b.2.0", state="degraded")
    announce(own_store, "celery@c.3.0", state="draining")
    announce(own_store, "celery@d.4.0", silent_s=40)
    announce(own_store, "celery@e.5.0", version="0.0.9")
    announce(own_store, "celery@f.6.0", state="stopped", why="no such folder")
    announce(own_store, "celery@g.7.0", state="ready", why="waits for a:1: 502 Bad Gateway")
    found = doctor(own.url, 0)
    assert levels(found, "remark") >= {
        "worker_starting", "worker_degraded", "worker_draining", "worker_silent",
        "worker_other_version", "worker_stopped", "worker_waits",
    }  # fmt: skip
    assert "ready (waits for a:1: 502 Bad Gateway)" in found["worker_waits"]["text"]
    assert "starting (waits for http://10.0.0.9/v1)" in found["worker_starting"]["text"]
    assert re.match(r"celery@d.4.0 was last heard 0:00:[45]\d ago", found["worker_silent"]["text"])
    assert "has failed and stopped (no such folder)" in found["worker_stopped"]["text"]
    said = f"celery@e.5.0 runs warmq 0.0.9, this producer {version()}"
    assert found["worker_other_version"]["text"] == said


def test_a_worker_that_announces_less_is_told_all_the_same(
    own: RedisServer, own_store: BatchStore
) -> None:
    seconds, _ = client_of(own_store).time()
    said = orjson.dumps({"state": "ready", "queue": DEFAULT_QUEUE})
    client_of(own_store).hset(keys.WORKERS, "celery@a.1.0", b"%d\0" % (seconds * 1000) + said)
    found = doctor(own.url, 1)
    assert found["worker"]["text"] == "celery@a.1.0: ready, 0 in flight, queue warmq"
    assert found["worker_older"]["text"].startswith("celery@a.1.0 speaks protocol 1, ")


@pytest.mark.parametrize(
    "junk", [b"x", b"\0{}", b"1\0", b"1\0[]", b"1\0{}", b'1\0{"queue":[]}'], ids=repr
)
def test_an_announcement_that_cannot_be_read_is_passed_over(
    own: RedisServer, own_store: BatchStore, junk: bytes
) -> None:
    announce(own_store)
    client_of(own_store).hset(keys.WORKERS, "junk", junk)
    found = doctor(own.url, 0)
    assert "junk" not in str(found)
    assert found["worker"]["facts"]["id"] == "celery@a.12.0a1b2c3d"


def test_requests_in_a_queue_without_a_worker_are_a_problem(
    own: RedisServer, own_store: BatchStore
) -> None:
    announce(own_store)
    submit_batch(own_store, 3, queue="warmq.tinny")
    found = doctor(own.url, 1)
    assert levels(found, "problem") == {"queue_unserved"}
    assert found["queue_unserved"]["facts"]["waiting"] == 3
    assert "no worker serves it; served are: warmq" in found["queue_unserved"]["text"]


def test_the_own_queue_without_a_worker_and_a_request_is_a_remark(
    own: RedisServer, own_store: BatchStore
) -> None:
    announce(own_store, queue="warmq.tiny")
    found = doctor(own.url, 0)
    assert found["queue_unused"]["level"] == "remark"
    assert "served are: warmq.tiny" in found["queue_unused"]["text"]


def test_open_batches_suspects_and_dead_letters_are_counted(
    own: RedisServer, own_store: BatchStore
) -> None:
    announce(own_store)
    client = client_of(own_store)
    submit_batch(own_store, 2, batch_id="first")
    client.zincrby(keys.BATCHES, -5000, "first")
    submit_batch(own_store, 1, batch_id="second")
    client.lpush(DEFAULT_QUEUE, b"junk")
    Lessee(client).pop(1)  # the junk becomes a dead letter
    client.lpush(keys.suspects_list(DEFAULT_QUEUE), celery_message("t1"))
    found = doctor(own.url, 0)
    assert found["open_batch"]["facts"]["id"] == "first"
    assert found["open_batch"]["facts"]["unfinished"] == 2
    assert found["suspects"]["facts"] == {"queue": DEFAULT_QUEUE, "count": 1}
    assert found["dead_letters"]["facts"]["count"] == 1
    # One is told as one
    assert found["dead_letters"]["text"] == "1 dead letter"
    assert found["suspects"]["text"].startswith("queue warmq has 1 request suspected of")
    assert found["open_batch"]["text"].startswith("unfinished batches: 2; the oldest is first")
