"""What Celery clients may set on their side: each gets an answer, or doctor names what is wrong.

Commands that would have a worker's Celery consumer take tasks are refused.
"""

from __future__ import annotations

import base64
import bz2
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
import redis
from celery import Celery
from kit.commands.doctor_findings import doctor
from kit.protocol.lessee import QUEUE, celery_message, chat
from kit.stacks.celery_side import client_app, send, serving, simulated

from contract import naming
from contract.redis import keys
from demo.stack import RedisServer, Worker, eventually
from worker.process.bootstep import CONTROL_QUEUE

MOST = 200_000
Stack = tuple[Celery, redis.Redis, str]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Run a Redis and a worker that takes small lines, for the tests of this file."""
    with serving(tmp_path_factory.mktemp("stack"), max_line_bytes=MOST) as found:
        yield found


# -- compressed bodies -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["gzip", "zlib", "bzip2", "lzma"])
def test_a_compressed_body_is_answered(stack: Stack, name: str) -> None:
    body = chat("größer " * 2_000)
    assert send(stack[0], body, compression=name).get(timeout=20)["object"] == "chat.completion"


def packed(text: bytes, kind: str, packed_text: bytes, task_id: str) -> bytes:
    """Return a message whose body a client has compressed."""
    message = orjson.loads(celery_message(task_id, compression=kind))
    message["body"] = base64.b64encode(packed_text).decode()
    message["properties"]["body_encoding"] = "base64"
    return orjson.dumps(message)


PACKS = {
    "application/x-gzip": lambda text: zlib.compress(text, 9),
    "application/x-bz2": bz2.compress,
    "application/x-lzma": lzma.compress,
}


@pytest.mark.parametrize("kind", PACKS)
@pytest.mark.parametrize("what", ["bomb", "cut", "damaged"])
def test_what_cannot_be_inflated_fails_in_words(stack: Stack, kind: str, what: str) -> None:
    app, client, _ = stack
    text = b"[[" + b" " * (2**26 if what == "bomb" else 1000) + b"],{},{}]"
    small = PACKS[kind](text)
    spoilt = {"bomb": small, "cut": small[:-8], "damaged": small[:6] + b"xyz" + small[9:]}[what]
    name = f"{what}-{kind}"
    client.lpush(QUEUE, packed(text, kind, spoilt, name))
    with pytest.raises(Exception, match="Celery option compression") as refused:
        app.AsyncResult(name).get(timeout=20)
    assert type(refused.value).__name__ == "RequestRejected"
    if what == "bomb":
        assert f"more than {MOST} bytes" in str(refused.value)


@pytest.mark.parametrize("kind", ["application/zstd", "application/x-brotli", "x\n", 7, ["a"]])
def test_another_compression_is_refused_by_name(stack: Stack, kind: object) -> None:
    app, client, _ = stack
    name = f"other-{kind!r}"
    client.lpush(QUEUE, celery_message(name, compression=kind))
    with pytest.raises(Exception, match=r"Celery option compression.* use gzip, bzip2 or lzma"):
        app.AsyncResult(name).get(timeout=20)


# -- ids and the protocol ----------------------------------------------------------------


@pytest.mark.parametrize("priority", [0, 6])
def test_a_client_of_task_protocol_1_is_told(stack: Stack, priority: int) -> None:
    _, client, url = stack
    with client_app(url) as older:
        older.conf.task_protocol = 1
        with pytest.raises(Exception, match="leave task_protocol at 2"):
            send(older, chat(), priority=priority).get(timeout=20)
    assert client.hlen(keys.DEAD) == 0


@pytest.mark.parametrize("task_id", ["a\nb", "a\0b", "x" * 600, "ü" * 200, "\x7f", "é\t"])
def test_a_client_with_an_odd_task_id_is_told(stack: Stack, task_id: str) -> None:
    app, client, _ = stack
    result = send(app, chat(), task_id=task_id)
    with pytest.raises(Exception, match=r"not a usable task id.*control characters") as refused:
        result.get(timeout=20)
    assert type(refused.value).__name__ == "RequestRejected"
    assert result.state == "FAILURE"
    assert 0 < client.pttl(f"{naming.RESULT_PREFIX}{task_id}") <= 604_800_000
    assert client.hlen(keys.DEAD) == 0


def test_a_message_that_nobody_waits_for_is_a_dead_letter(stack: Stack) -> None:
    _, client, _ = stack
    for message in (
        celery_message("nobody\nb", ignore_result=True),
        celery_message("nobody\nc", warmq={"batch": "b1"}),
        celery_message(""),
        celery_message("x" * 70_000),
    ):
        client.lpush(QUEUE, message)
    eventually(lambda: client.hlen(keys.DEAD) == 4, 20, "all are dead letters")
    assert not client.keys(f"{naming.RESULT_PREFIX}nobody*")
    client.delete(keys.DEAD, *client.keys("warmq:dead:*"))


# -- lists that no worker reads ------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "key"),
    [
        ("priority_steps", list(range(10)), f"{QUEUE}\x06\x165"),
        ("sep", ":", f"{QUEUE}:3"),
        ("global_keyprefix", "prod:", f"prod:{QUEUE}\x06\x163"),
    ],
)
def test_doctor_names_a_list_that_no_worker_reads_and_the_option(
    stack: Stack, option: str, value: object, key: str
) -> None:
    _, client, url = stack
    assert "unread_list" not in doctor(url, 0)
    with client_app(url) as other:
        other.conf.broker_transport_options = {option: value}
        send(other, chat(), priority=5)
    found = doctor(url, 1)["unread_list"]
    client.delete(key)
    facts = found["facts"]
    assert (facts["key"], facts["option"], facts["waiting"]) == (key, option, 1)
    assert option in found["text"] and option in found["remedy"]


# -- keys of another type ------------------------------------------------------------------


@pytest.mark.parametrize("key", [QUEUE, f"{QUEUE}\x06\x166", keys.LEASES, keys.WORKERS])
def test_a_key_of_another_type_is_named_by_worker_and_doctor(tmp_path: Path, key: str) -> None:
    with RedisServer(tmp_path / "redis", "--appendonly", "no") as server:
        client, log = server.client(), tmp_path / "worker.log"
        client.set(key, "mine")
        facts = doctor(server.url, 1)["wrong_type"]["facts"]
        assert (facts["key"], facts["kind"]) == (key, "string")
        with simulated(server.url, log) as worker:
            told = f"the key {key!r} is a string of another program"
            eventually(lambda: told in log.read_text(), 20, "the worker names it")
            assert log.read_text().count(told) < 5
            client.delete(key)
            served_again(server, worker)


def served_again(server: RedisServer, worker: Worker) -> None:
    with client_app(server.url) as app:
        assert send(app, chat()).get(timeout=20)["object"] == "chat.completion"
        assert worker.stop() == 0


# -- commands --------------------------------------------------------------------------------


def told(app: Celery, command: str, **arguments: object) -> str:
    """Return in what words the one worker refuses a command."""
    (reply,) = app.control.broadcast(command, arguments=arguments, reply=True, timeout=5, limit=1)
    (said,) = reply.values()
    return str(said["error"])


def test_commands_that_would_read_a_queue_are_refused_in_words(
    stack: Stack,
) -> None:
    app, _, _ = stack
    assert "WARMQ_QUEUE" in told(app, "add_consumer", queue=QUEUE)
    assert "WARMQ_QUEUE" in told(app, "add_consumer", queue="images", routing_key="x")
    assert "WARMQ_QUEUE" in told(app, "cancel_consumer", queue=CONTROL_QUEUE)
    assert "task ids" in told(app, "revoke_by_stamped_headers", headers={"a": "b"})


def test_requests_sent_after_add_consumer_are_answered(
    stack: Stack,
) -> None:
    app, _, _ = stack
    app.control.add_consumer(QUEUE)
    sent = [send(app, chat(f"{n}"), priority=(0, 6)[n % 2]) for n in range(60)]
    answers = [one.get(timeout=30)["object"] for one in sent]
    assert answers == ["chat.completion"] * 60


def test_tasks_of_another_application_stay_in_their_lists(
    stack: Stack,
) -> None:
    app, client, _ = stack
    app.control.add_consumer("images")  # to all workers of this Redis, as Celery has it
    sent = [
        app.send_task("images.resize", args=[n], queue=queue, priority=priority)
        for n in range(10)
        for queue in ("images", CONTROL_QUEUE)
        for priority in (0, 6)
    ]
    app.control.cancel_consumer("images")
    assert send(app, chat()).get(timeout=30)
    (pong,) = app.control.inspect(timeout=5, limit=1).ping().values()  # type: ignore[union-attr]
    assert pong == {"ok": "pong"}
    for queue in ("images", CONTROL_QUEUE):
        for priority in (0, 6):
            assert client.llen(naming.priority_list(queue, priority)) == 10
    assert {result.state for result in sent} == {"PENDING"}
