"""Whatever lies in the queue's lists, the worker goes on and every message comes to its end."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis
from hypothesis import example, given
from hypothesis import strategies as st
from kit.hostile.hostile import TEXTS, envelopes, examples, pickled
from kit.hostile.hostile_request import deep
from kit.protocol.lessee import (
    QUEUE,
    SEED,
    Lessee,
    celery_message,
    chat,
    dead_messages,
    stored,
    submit_batch,
)

from contract import naming
from contract.errors import RequestRejected
from contract.message import read_delivery
from contract.redis import keys
from contract.redis.batches import BatchStore
from demo.stack import RedisServer, eventually
from worker.drain.drain import Drain
from worker.drain.leases import Leases
from worker.drain.loop import run_drain
from worker.drain.side_tasks import SideTasks
from worker.engine.simulated import SimulatedSettings
from worker.engine.simulated.engine import SimulatedEngine

#: Shared machines are slow at times; what waits here has deadlines of its own.
pytestmark = pytest.mark.timeout(200)
MB = 2**20


class DrainThread:
    """A drain with the simulated engine on a thread of its own."""

    def __init__(self, url: str) -> None:
        self.settings = SimulatedSettings(
            redis_url=url,
            engine="simulated",
            simulated_slots=8,
            simulated_tests=b'{"latency_s": 0}',
        )
        self.drain: Drain
        self._loop: asyncio.AbstractEventLoop
        self._begun = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        leases = Leases(self.settings, "hostile")
        self.drain = Drain(self.settings, leases, lambda: SimulatedEngine(8, 0.0))
        self._begun.set()
        try:
            await run_drain(self.drain, SideTasks(self.drain).tasks())
        finally:
            await leases.close()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def __enter__(self) -> DrainThread:
        self._thread.start()
        assert self._begun.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        if self.alive:
            self._loop.call_soon_threadsafe(self.drain.hurry)
        self._thread.join(30)


@pytest.fixture(scope="module")
def drain(redis_server: RedisServer) -> Iterator[DrainThread]:
    """Return a drain that all tests of this file throw things at."""
    with DrainThread(redis_server.url) as running:
        yield running
        assert running.alive, "the drain ended"


#: A queue that the drain of this file does not look into.
UNSERVED = "unserved"
TRAP = Path("/tmp") / "warmq-hostile-trap"
B1 = naming.request_id("b1", "c1")
#: What the members of the batch in these tests carry.
LIFE = "a life that nobody guesses"
batches = st.fixed_dictionaries(
    {}, optional={
        "batch": st.sampled_from(["b1", "b1:index", "b1:failed", "none", "", *TEXTS]),
        "created": st.sampled_from(["1", 1, 1.0, 1e300, True, None, [1]]),
        "life": st.sampled_from([LIFE, "", "other", 5, None, [LIFE]]),
        "custom_id": st.sampled_from(TEXTS) | st.integers(),
        "line": st.sampled_from([1, -1, 1.5, 2**64, 1e308, "1", True, None]),
        "url": st.sampled_from(["/v1/completions", "/etc/passwd", "\0", 5]),
        "deadline": st.sampled_from([None, 1, 4e9, -1e308, 1e308, 2**64, True, "soon"]),
        "v": st.integers(),
    },
)  # fmt: skip
FIRST_UNESCAPED_QUOTE_AND_COMMA = re.compile(r'(?<!\\)(?:\\\\)*",')
request_ids = st.sampled_from([B1, *TEXTS, *(f"r{i}" for i in range(20)), 5, None, ["r"]])
messages = envelopes(batches, request_ids, str(TRAP))


def empty_with_a_batch(client: redis.Redis) -> BatchStore:
    """Empty Redis but for an open batch `b1`."""
    client.flushdb()
    store = BatchStore(client, ttl_ms=60_000)
    store.create("b1", SEED, {"queue": QUEUE})
    client.hset(keys.batch_key("b1"), mapping={"life": LIFE, "total": 1000})
    return store


def read_leniently(raw: bytes) -> dict[str, Any]:
    """Return a message's headers as POP finds them: where the body comes first, as kombu writes
    it, only what follows it is decoded."""
    text = raw.decode(errors="replace")
    begin = re.match(r'\{"body":\s?"', text)
    end = FIRST_UNESCAPED_QUOTE_AND_COMMA.search(text, begin.end()) if begin else None
    if end and re.match(r'\s?"content-', text[end.end() :]):
        text = '{"body":"",' + text[end.end() :]
    headers = json.loads(text, strict=False)["headers"]
    assert isinstance(headers["id"], str)
    return headers  # type: ignore[no-any-return]


def needs_no_answer(client: redis.Redis, headers: dict[str, Any]) -> bool:
    """Return whether nobody waits for this one: its batch is gone, or it wants no result."""
    ours = headers.get("warmq")
    batch = ours.get("batch") if isinstance(ours, dict) else None
    if not isinstance(batch, str) or batch == "":
        return headers.get("ignore_result") is True
    return client.hget(keys.batch_key(batch), "life") != str(ours.get("life")).encode()


def settled(client: redis.Redis, store: BatchStore, pushed: list[bytes]) -> None:
    """Check that every message ended: answered, a dead letter, or of a batch that is gone."""
    assert client.zcard(keys.LEASES) == 0
    assert not client.keys("warmq:worker:*")
    assert not any(client.llen(key) for key in (*naming.priority_lists(QUEUE), UNSERVED))
    dead = dead_messages(store)
    assert all(letter["reason"] for letter in store.dead_letters())
    for raw in pushed:
        if raw in dead:
            continue
        headers = read_leniently(raw)
        # Of a spoilt message whose request has its answer nobody needs to know.
        answered = client.exists(keys.result_key(headers["id"]))
        assert answered or needs_no_answer(client, headers), raw
    counted = state_count(store)
    assert counted == client.llen(keys.batch_key("b1", "finished"))
    assert not TRAP.exists()


def state_count(store: BatchStore) -> int:
    batch = store.batch("b1")
    assert batch is not None
    return batch.terminal


@examples(150)
@given(st.lists(messages, min_size=1, max_size=12))
@example([celery_message("x", task="?").replace(b'"?"', deep(900))])
@example([celery_message("x", warmq={"batch": "b1", "created": 1.0})])
@example([celery_message("x", warmq={"batch": "b1", "created": 1.00000000000000001})])
@example([celery_message("x", warmq={"batch": "b1"}).replace(b'"body":"', b'"body":""p')])
@example([celery_message("twin", expires=1), celery_message("twin")])
@example([celery_message(B1, warmq={"batch": "b1", "created": "1"})] * 5)
def test_the_drain_ends_every_message_and_serves_the_next(
    redis_client: redis.Redis, drain: DrainThread, pushed: list[bytes]
):
    store = empty_with_a_batch(redis_client)
    redis_client.lpush(QUEUE, *pushed, celery_message("sentinel"))
    eventually(lambda: stored(redis_client, "sentinel"), 20, f"the drain serves on: {pushed}")
    eventually(
        lambda: not redis_client.zcard(keys.LEASES) and not redis_client.llen(QUEUE), 20, "settled"
    )
    settled(redis_client, store, pushed)


@examples(200)
@given(st.lists(messages, min_size=1, max_size=12), st.integers(1, 20), st.integers(1, 2000))
@example([celery_message("x", warmq={"created": "1"})], 1, 1)  # no batch: it is answered
def test_pop_and_the_workers_decoder_agree_about_every_message(
    redis_client: redis.Redis, pushed: list[bytes], k: int, max_bytes: int
):
    store = empty_with_a_batch(redis_client)
    redis_client.lpush(UNSERVED, *pushed)
    worker = Lessee(redis_client, queue=UNSERVED)
    order = []
    for _ in range(len(pushed) * 2 + 2):
        leases = worker.pop(k, max_bytes=max_bytes)
        assert sum(len(lease.message) for lease in leases[1:]) <= max_bytes
        for lease in leases:
            order.append(lease.message)
            try:
                delivery = read_delivery(lease.id, lease.message)
            except RequestRejected as error:
                assert worker.bury(lease, error.message) == 1
                continue
            # What POP let through must be DONE's too: alive there, alive here.
            written = worker.done(lease)
            exists = redis_client.exists(keys.result_key(delivery.request_id))
            assert written or exists, "an answer that nobody gets"
    assert iter_in(order, pushed), "in the order they were sent"
    settled(redis_client, store, pushed)


def iter_in(part: list[bytes], whole: list[bytes]) -> bool:
    rest = iter(whole)
    return all(any(raw == other for other in rest) for raw in part)


@pytest.mark.parametrize("priority", [0, 3, 6, 9])
def test_garbage_in_any_list_is_counted_among_the_dead_letters(
    redis_client: redis.Redis, drain: DrainThread, priority: int
):
    store = empty_with_a_batch(redis_client)
    garbage = [b"", b"\0" * 100, pickled(str(TRAP)), deep(1000), b"\xff\xfe", b'{"v1": true}']
    redis_client.lpush(naming.priority_list(QUEUE, priority), *garbage, celery_message("good"))
    assert eventually(lambda: stored(redis_client, "good"), 20)
    assert sorted(dead_messages(store)) == sorted(garbage)
    assert drain.alive
    assert not TRAP.exists()


@pytest.mark.parametrize(
    ("content_type", "body", "told"),
    [
        ("application/x-python-serialize", pickled(str(TRAP)).hex(), "only application/json"),
        ("application/json", pickled(str(TRAP)).hex(), "not valid JSON"),
        ("application/x-yaml", "!!python/object/apply:os.system [id]", "only application/json"),
        ("application/json", "[[1],{},{}]", "exactly one argument"),
        ("application/json", "[" * 1000 + "]" * 1000, "unreadable message body"),
        ("application/json", "[" + "[]," * (4 * MB) + "[]]", "JSON values"),
        ("application/json", "[[" + '{"a":' * 900 + "1" + "}" * 900 + "],{},{}]", "is given"),
    ],
    ids=["pickle", "pickle as JSON", "yaml", "number", "deep", "pure structure", "deep body"],
)  # fmt: skip
def test_a_body_that_is_none_is_refused_by_name_and_runs_nothing(
    redis_client: redis.Redis, drain: DrainThread, content_type: str, body: str, told: str
):
    message: dict[str, Any] = orjson.loads(celery_message("bad"))
    message |= {"content-type": content_type, "body": body}
    redis_client.lpush(QUEUE, orjson.dumps(message), celery_message("good"))
    eventually(lambda: stored(redis_client, "good"), 20)
    meta = eventually(lambda: stored(redis_client, "bad"), 20)
    assert told in meta["warmq"]["error"]["message"]  # type: ignore[index]
    assert meta["status"] == "FAILURE"  # type: ignore[index]
    assert not TRAP.exists()


@pytest.mark.parametrize("encoded", ["base64", "utf-8"])
def test_a_pickled_body_is_never_loaded(
    redis_client: redis.Redis, drain: DrainThread, encoded: str
):
    import base64

    message: dict[str, Any] = orjson.loads(celery_message("bad"))
    message["body"] = base64.b64encode(pickled(str(TRAP))).decode()
    message["properties"]["body_encoding"] = encoded
    redis_client.lpush(QUEUE, orjson.dumps(message))
    assert eventually(lambda: stored(redis_client, "bad"), 20)["status"] == "FAILURE"  # type: ignore[index]
    assert not TRAP.exists()


def test_custom_ids_that_look_like_anything_else_come_back_as_they_are(
    redis_client: redis.Redis, drain: DrainThread, store: BatchStore
):
    odd = [text for text in TEXTS if text and not any("\ud800" <= c <= "\udfff" for c in text)]
    submitted = submit_batch(store, len(odd), seal=True)
    assert eventually(lambda: store.batch(submitted.id).finished, 20)  # type: ignore[union-attr]
    for n, text in enumerate(odd):
        ours = {"batch": "", "custom_id": text, "line": n}
        redis_client.lpush(QUEUE, celery_message(f"odd{n}", chat(text or "x"), warmq=ours))
    for n, text in enumerate(odd):
        meta = eventually(lambda n=n: stored(redis_client, f"odd{n}"), 20)
        assert meta["warmq"]["custom_id"] == text  # type: ignore[index]


def test_messages_of_ten_megabytes_are_served_and_taken_within_the_byte_bound(
    redis_client: redis.Redis, drain: DrainThread
):
    text = "x" * (10 * MB)
    for n in itertools.count():
        if n == 12:
            break
        redis_client.lpush(QUEUE, celery_message(f"big{n}", chat(text)))
    peak = eventually(lambda: stored(redis_client, "big11") and 1, 50)
    assert peak
    for n in range(12):
        assert stored(redis_client, f"big{n}")["status"] == "SUCCESS"  # type: ignore[index]
