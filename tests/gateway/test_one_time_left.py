"""One time left for a batch: the page, its stream and all commands show the same."""

from __future__ import annotations

import re
import subprocess
import time
import urllib.request
from collections.abc import Iterator

import httpx
import orjson
import pytest
from kit.commands.doctor_findings import announce, doctor, up_for_long
from kit.commands.support import finish, producer_command, producer_env, run_producer
from kit.gateways.gateway_process import GatewayProcess
from kit.protocol.lessee import QUEUE, Lessee, submit_batch

from contract.redis import keys
from contract.redis.batches import BatchStore
from demo.stack import RedisServer, eventually

WORKER = "celery@a.12.0a1b2c3d"
#: Lengths of time as the page and the commands write them.
_PAGE = re.compile(r'data-b="left">\s*(?:(\d+) min ?)?(?:(\d+(?:\.\d)?) s)?')
_CLOCK = r"(\d):(\d\d):(\d\d)"


@pytest.fixture
def store(redis_server: RedisServer) -> BatchStore:
    """An empty Redis in which a queue had 40 tokens a second on four slots, for some minutes."""
    client = redis_server.client()
    client.flushall()
    store = BatchStore(client, ttl_ms=60_000)
    now = store.now_ms() // 60_000
    for minute in (now - 3, now - 2, now - 1):
        sums = f"{minute} 60 0 1200 1200 0 240 240"
        client.hset(f"warmq:ring:{QUEUE}", str(minute % 1440), sums)
    announce(store, WORKER, slots=4)
    return store


def seconds_in(text: str) -> float | None:
    found = re.search(_CLOCK, text)
    return (
        None
        if found is None
        else sum(int(n) * u for n, u in zip(found.groups(), (3600, 60, 1), strict=True))
    )


def of_page(gateway: GatewayProcess, batch_id: str) -> float | None:
    found = _PAGE.search(httpx.get(f"{gateway.url}/ui/batches/{batch_id}").text)
    assert found is not None
    minutes, seconds = found.groups()
    if minutes is seconds is None:
        return None
    return int(minutes or 0) * 60 + float(seconds or 0)


def of_stream(gateway: GatewayProcess, batch_id: str, most: int = 1) -> list[float | None]:
    """Return the times left in the stream's first events about a batch, until there is none."""
    found: list[float | None] = []
    url = f"{gateway.url}/ui/live?batches={batch_id}"
    event = ""
    with urllib.request.urlopen(url, timeout=30) as answer:  # the page is in no description
        for line in (raw.decode().strip() for raw in answer):
            event = line.removeprefix("event: ") if line.startswith("event: ") else event
            if line.startswith("data: ") and event == "batch":
                found.append(orjson.loads(line.removeprefix("data: "))["left_s"])
                if len(found) == most or found[-1] is None:
                    break
    return found


def of_status(url: str, batch_id: str) -> float | None:
    shown = run_producer("status", batch_id, redis_url=url).stdout
    return next((seconds_in(line) for line in shown.splitlines() if line.startswith("left")), None)


def of_top(url: str, batch_id: str) -> float | None:
    shown = run_producer("top", "--once", redis_url=url).stdout
    (row,) = (line for line in shown.splitlines() if line.startswith(batch_id))
    return seconds_in(row)


def lines_of_watch(url: str, batch_id: str) -> Iterator[str]:
    command = producer_command("watch", batch_id)
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=producer_env(url), text=True) as run:
        assert run.stderr is not None
        try:
            yield from run.stderr
        finally:
            run.kill()


def of_watch(url: str, batch_id: str) -> float | None:
    line = next(lines_of_watch(url, batch_id))
    assert "done" in line
    return seconds_in(line) if "ETA" in line else None


def test_all_places_show_the_same_time_left(
    gateway: GatewayProcess, redis_server: RedisServer, store: BatchStore
) -> None:
    # Given a batch of which some requests have ended, and another one of the same tenant
    submit_batch(store, 90, batch_id="other")
    submit_batch(store, 400)
    lessee = Lessee(redis_server.client(), WORKER)
    finish(lessee, lessee.pop(40))
    url = redis_server.url
    # When all places are asked about it
    found = {
        "status": of_status(url, "b1"), "top": of_top(url, "b1"), "watch": of_watch(url, "b1"),
        "page": of_page(gateway, "b1"), "stream": of_stream(gateway, "b1")[0],
    }  # fmt: skip
    # Then they agree, to the unit that each one shows
    known = [one for one in found.values() if one is not None]
    assert len(known) == len(found), found
    assert max(known) - min(known) <= 1, found


def test_what_ends_while_a_place_looks_changes_no_pace(
    gateway: GatewayProcess, redis_server: RedisServer, store: BatchStore
) -> None:
    # Given a batch whose requests end much faster than those of the last minutes
    submit_batch(store, 4000)
    lessee, url = Lessee(redis_server.client(), WORKER), redis_server.url
    watching = lines_of_watch(url, "b1")
    next(watching)
    for _ in range(4):
        finish(lessee, lessee.pop(40))
    # When two of the places have looked for some time, and one has not
    line = next(line for line in watching if "160/4000 done" in line)
    watching.close()
    found = [seconds_in(line), of_status(url, "b1"), of_top(url, "b1")]
    # Then they agree
    assert None not in found
    assert max(found) - min(found) <= 2, found  # type: ignore[type-var, operator]


def test_no_place_has_a_time_left_while_every_worker_is_silent(
    gateway: GatewayProcess, redis_server: RedisServer, store: BatchStore
) -> None:
    url = redis_server.url
    submit_batch(store, 400)
    Lessee(redis_server.client(), WORKER).pop(4)
    up_for_long(store)
    told = "worker celery@a (process 12) of tiny (queue warmq) has been silent for 0:00:"
    page = f"{gateway.url}/ui/batches/b1"
    for silent in (False, True):
        # Given a worker that is well, or whose last words are five seconds old
        announce(store, WORKER, slots=4, **({"silent_s": 5} if silent else {}))
        shown = httpx.get(page).text
        # Then the page of the batch names it at the same time as the commands
        assert (
            ("has been silent for" in shown) == ('data-stall="workers_silent"' in shown) == silent
        )
        assert (of_page(gateway, "b1") is None) == silent
        overview = httpx.get(f"{gateway.url}/ui").text
        assert ("1 batch runs, done about" in overview) != silent
        assert ("1 batch waits: tiny has no worker that is ready." in overview) == silent
        assert (">0 / 0</dd>" in overview) == silent
        assert ('status-silent"' in overview) == silent
        request = httpx.get(f"{page}/request?id=c1").text
        assert ('status-silent"' in request) == ('data-stall="workers_silent"' in request) == silent
        assert ('status-running"' in request) != silent
        if silent:
            announce(store, WORKER, slots=4, silent_s=5)  # the commands take their time
        status = run_producer("status", "b1", redis_url=url).stdout
        assert (f"!! {told}" in status) == silent
        assert (of_status(url, "b1") is None) == silent
    announce(store, WORKER, slots=4, silent_s=5)
    assert of_watch(url, "b1") is None
    announce(store, WORKER, slots=4, silent_s=5)
    assert of_top(url, "b1") is None
    announce(store, WORKER, slots=4, silent_s=5)
    assert doctor(url, 1)["workers_silent"]["level"] == "problem"
    announce(store, WORKER, slots=4, silent_s=5)
    assert of_stream(gateway, "b1") == [None]
    # When another worker of the queue is well, the silent one stalls nothing
    announce(store, "celery@b.13.0a1b2c3e", slots=4)
    assert "workers_silent" not in httpx.get(page).text
    assert of_page(gateway, "b1") is not None


def test_the_stream_has_no_time_left_from_the_moment_of_the_silence_on(
    gateway: GatewayProcess, redis_server: RedisServer, store: BatchStore
) -> None:
    submit_batch(store, 400)
    up_for_long(store)
    time.sleep(1)  # what the gateway has read for another stream is forgotten
    announce(store, WORKER, slots=4, silent_s=-1)
    first, *_ = found = of_stream(gateway, "b1", 9)
    assert first is not None
    assert found[-1] is None
    eventually(lambda: of_page(gateway, "b1") is None, 5)


def test_a_dead_worker_s_model_is_in_the_command_that_starts_another(
    gateway: GatewayProcess, redis_server: RedisServer, store: BatchStore
) -> None:
    url, command = redis_server.url, "WARMQ_MODEL=models/tiny warmq-worker"
    up_for_long(store)
    pages = [f"{gateway.url}/ui", f"{gateway.url}/ui/workers"]
    announce(store, WORKER, model="models/tiny", silent_s=20)
    submit_batch(store, 5)
    assert command in httpx.get(pages[0]).text.split("<pre>")[1]
    assert command in run_producer("status", "b1", redis_url=url).stdout
    found = doctor(url, 1)
    assert command in found["no_worker"]["remedy"]
    assert command in found["queue_unserved"]["remedy"]
    store._client.delete(keys.WORKERS)
    for page in pages:
        assert "<code>WARMQ_MODEL=… warmq-worker</code>" in httpx.get(page).text
    # A queue whose name has a model
    store._client.flushall()
    submit_batch(store, 5, queue="warmq.small")
    text = "<code>WARMQ_MODEL=… WARMQ_SERVED_MODEL_NAME=small warmq-worker</code>"
    assert text in httpx.get(pages[0]).text
