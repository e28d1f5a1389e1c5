"""`from producer import Client`: programs submit iterables, read results as they come, cancel."""

from __future__ import annotations

import asyncio
import datetime as dt
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.commands.support import (
    batch_file,
    finish,
    producer_env,
    queued,
    run_all,
    run_producer,
    state,
)
from kit.protocol.lessee import Lessee, client_of
from kit.redis_servers.lost_writes import ForgetfulStore, Memory
from kit.stacks.celery_side import simulated

import producer
from contract.errors import BatchConflict, StoreUnavailable
from contract.redis.batches import BatchStore
from producer import AsyncClient, BatchStatus, Client
from producer.batch_watch import WritesLost
from producer.input.options import BadOption


@pytest.fixture
def client(redis_url: str) -> Iterator[Client]:
    with Client(redis_url) as client:
        yield client


def requests(count: int) -> list[dict[str, Any]]:
    return [{"custom_id": f"r{n}", "prompt": f"question {n}"} for n in range(count)]


def test_a_list_is_answered_and_each_result_says_whose_it_is(client: Client, store: BatchStore):
    batch = client.submit(requests(3))
    run_all(store)
    found = {result.custom_id: result.text for result in batch.results()}
    assert found == {f"r{n}": f"answer to r{n}" for n in range(3)}
    first = next(batch.results("input"))
    assert (first.line, first.ok, first.error) == (1, True, None)
    assert first.body is not None
    assert first.body["usage"]["total_tokens"] == 5
    status = batch.wait(5)
    assert (status.status, status.total, status.completed, status.pending) == ("completed", 3, 3, 0)
    assert status.finished_at is not None
    assert status.created_at <= status.finished_at


def test_results_come_while_others_still_run(client: Client, store: BatchStore):
    batch = client.submit(requests(4))
    lessee = Lessee(client_of(store))
    results = batch.results()
    seen = []
    for _ in range(4):
        finish(lessee, lessee.pop(1))
        seen.append(next(results).custom_id)
    assert seen == ["r0", "r1", "r2", "r3"]
    assert next(results, None) is None


def test_a_generator_is_read_once_and_never_held_whole(client: Client, store: BatchStore):
    asked = []

    def given() -> Iterator[dict[str, Any]]:
        for request in requests(2200):
            asked.append(len(queued(store)) if len(asked) % 500 == 0 else -1)
            yield request

    batch = client.submit(given())
    assert batch.status().total == 2200
    assert len(queued(store)) == 2200
    assert max(asked) >= 500  # lines were queued before the last were made


def test_a_request_that_is_wrong_gets_an_error_that_names_it_and_the_others_run(
    client: Client, store: BatchStore
):
    batch = client.submit(
        [
            {"custom_id": "good", "prompt": "x"},
            "just a text",
            {"custom_id": "odd", "prompt": {1, 2}},
            {"custom_id": "hot", "prompt": "x", "temperature": 9},
            {"custom_id": "good", "prompt": "again"},
        ]  # type: ignore[list-item]
    )
    run_all(store)
    found = {result.line: result for result in batch.results("input")}
    assert found[1].ok
    told = {line: result.error for line, result in found.items() if result.error is not None}
    assert told[2].message == (
        'request 2: must be a dict such as {"prompt": "..."} or {"messages": [...]}, not str'
    )
    assert told[3].message.startswith("request 3: field prompt: cannot be written as JSON")
    assert found[3].custom_id == "odd"
    assert told[4].message.startswith("request 4, field temperature: ")
    assert told[4].param == "temperature"
    assert told[5].code == "duplicate_custom_id"
    assert "request 5" in told[5].message


def test_the_same_batch_id_goes_on_where_an_interrupted_submit_stopped(
    client: Client, store: BatchStore
):
    def breaks() -> Iterator[dict[str, Any]]:
        yield from requests(1700)[:1200]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        client.submit(breaks(), batch_id="b1")
    assert 0 < len(queued(store)) < 1700
    client.submit(requests(1700), batch_id="b1")
    client.submit(requests(1700), batch_id="b1")
    assert [m["headers"]["warmq"]["custom_id"] for m in queued(store)] == [
        f"r{n}" for n in range(1700)
    ]
    with pytest.raises(BatchConflict, match="use another batch_id"):
        client.submit(requests(1699), batch_id="b1")


def test_a_list_is_submitted_again_where_redis_loses_its_last_writes(
    client: Client, store: BatchStore
):
    forgetful, memory = ForgetfulStore(store), Memory(store)
    forgetful.after["enqueue 1"] = memory.keep
    forgetful.before["enqueue 4"] = memory.put_back
    client.__dict__["_store"] = forgetful
    client.submit(requests(1700), batch_id="b1")
    assert len(queued(store)) == 1700


def test_a_generator_cannot_be_and_the_error_says_what_to_do(client: Client, store: BatchStore):
    forgetful, memory = ForgetfulStore(store), Memory(store)
    forgetful.after["enqueue 1"] = memory.keep
    forgetful.before["enqueue 4"] = memory.put_back
    client.__dict__["_store"] = forgetful
    with pytest.raises(WritesLost, match="the same submit with batch_id='b1' goes on"):
        client.submit(iter(requests(1700)), batch_id="b1")


def test_a_program_goes_on_with_what_the_command_has_submitted(
    client: Client, store: BatchStore, redis_url: str, tmp_path: Path
):
    source = batch_file(tmp_path / "in.jsonl", 3)
    assert run_producer("submit", source, "--batch-id", "b1", redis_url=redis_url).returncode == 0
    same = client.submit(source, batch_id="b1")
    assert same.status().total == 3
    run_all(store)
    assert len(list(client.batch("b1"))) == 3
    assert [batch.id for batch in client.batches()] == ["b1"]


def test_who_waits_too_briefly_is_told_how_far_it_is(client: Client):
    batch = client.submit(requests(2))
    with pytest.raises(TimeoutError, match="0 of 2 requests have"):
        batch.wait(0.05)


def test_a_cancelled_batch_ends_and_its_results_say_so(client: Client):
    batch = client.submit(requests(3))
    assert batch.cancel() == 3
    assert batch.wait(5).status == "cancelled"
    assert {r.error.code for r in batch.results() if r.error is not None} == {"cancelled"}
    assert batch.retry("cancelled") == 3
    assert batch.status().pending == 3


def test_a_batch_is_deleted_when_it_has_ended_or_by_force(client: Client):
    batch = client.submit(requests(3), batch_id="b1")
    with pytest.raises(BatchConflict, match="force=True"):
        batch.delete()
    batch.delete(force=True)
    with pytest.raises(BatchConflict, match="there is no batch b1"):
        client.batch("b1")


def test_results_of_an_unfinished_batch_are_refused_followed_or_partial(
    client: Client, store: BatchStore
):
    batch = client.submit(requests(3))
    with pytest.raises(BatchConflict, match="follow=True waits for it, partial=True"):
        list(batch.results(follow=False))
    lessee = Lessee(client_of(store))
    finish(lessee, lessee.pop(1))
    assert len(list(batch.results(follow=False, partial=True))) == 1


def test_options_shape_the_batch_as_those_of_the_command_do(client: Client, store: BatchStore):
    batch = client.submit(
        requests(2),
        model="llama",
        fields={"max_tokens": 7},
        priority=0,
        tenant="lab",
        turn="fifo",
        deadline=dt.timedelta(hours=1),
        dedupe=True,
        order="prefix",
    )
    fields = state(store, batch.id).fields
    assert (fields["queue"], fields["tenant"]) == ("warmq.llama", "lab")
    assert int(fields["deadline"]) - int(fields["created_at"]) == 3_600_000
    assert queued(store, "warmq.llama")
    assert batch.status() == BatchStatus(
        batch.id, "in_progress", 2, 0, 0, 0, 0, 0, 0, batch.status().created_at, None, ""
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"priority": 12}, "priority 12: give one of 0, 1"),
        ({"turn": "first"}, "turn 'first': give one of fair, fifo"),
        (
            {"modell": "x"},
            "modell is not an option of submit; the options are columns, keep, delimiter,",
        ),
        ({"batch_id": "a b"}, "batch id 'a b': use 1 to 128"),
        ({"deadline": dt.timedelta(0)}, "give a duration above 0"),
        ({"deadline": dt.datetime(2099, 1, 1)}, "the time zone is missing"),
        ({"deadline": dt.datetime(2001, 1, 1, tzinfo=dt.UTC)}, "has passed"),
    ],
)
def test_a_wrong_argument_is_named(client: Client, options: dict[str, Any], told: str):
    with pytest.raises(BadOption, match=told):
        client.submit(requests(1), **options)


@pytest.mark.parametrize("given", [{"prompt": "x"}, 7, None])
def test_what_is_no_iterable_of_requests_is_refused_before_anything_is_made(
    client: Client, given: Any
):
    with pytest.raises(BadOption, match="give an iterable of dicts"):
        client.submit(given)
    assert client.batches() == []


def test_an_order_is_not_promised_for_what_can_be_read_only_once(client: Client):
    with pytest.raises(BadOption, match="give a list"):
        client.submit(iter(requests(3)), order="prefix")


def test_a_redis_that_is_away_is_named():
    with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:1"):
        Client("redis://127.0.0.1:1/0").submit(requests(1))


def test_the_package_imports_nothing_before_the_client_is_asked_for():
    program = "import sys, producer; print('redis' in sys.modules, len(dir(producer.Client)) > 0)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "True"]
    with pytest.raises(AttributeError):
        _ = producer.Clint  # type: ignore[attr-defined]


# -- asyncio -----------------------------------------------------------------


async def test_the_same_with_asyncio_and_the_loop_is_never_held_up(
    redis_url: str, store: BatchStore
):
    gaps: list[float] = []

    async def tick() -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            gaps.append(time.monotonic() - before)

    ticking = asyncio.create_task(tick())

    async def given() -> AsyncIterator[dict[str, Any]]:
        for request in requests(1200):
            yield request

    async with AsyncClient(redis_url) as client:
        batch = await client.submit(given(), batch_id="b1")
        assert (await batch.status()).total == 1200
        answering = threading.Thread(target=run_all, args=(store,))
        answering.start()
        found = [result.custom_id async for result in batch.results("input")]
        await asyncio.to_thread(answering.join)
        assert found == [f"r{n}" for n in range(1200)]
        assert (await batch.wait(5)).completed == 1200
        assert [each.id for each in await client.batches()] == ["b1"]
        assert await (await client.batch("b1")).cancel() == 0
    ticking.cancel()
    assert len(gaps) > 2


async def test_who_stops_reading_results_leaves_no_thread_behind(redis_url: str, store: BatchStore):
    before = set(threading.enumerate())
    async with AsyncClient(redis_url) as client:
        batch = await client.submit(requests(3))
        lessee = Lessee(client_of(store))
        finish(lessee, lessee.pop(1))
        results = batch.results()
        assert (await anext(results)).custom_id == "r0"
        await results.aclose()  # type: ignore[attr-defined]
        again = batch.results()
        assert (await anext(again)).custom_id == "r0"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(again), 0.2)
    named = {thread for thread in threading.enumerate() if thread.name == "warmq-client"}
    for thread in named - before:
        await asyncio.to_thread(thread.join, 5)
        assert not thread.is_alive()


async def test_errors_come_through_as_they_are(redis_url: str):
    async def breaks() -> AsyncIterator[dict[str, Any]]:
        yield {"prompt": "x"}
        raise ZeroDivisionError

    async with AsyncClient(redis_url) as client:
        with pytest.raises(ZeroDivisionError):
            await client.submit(breaks())
        batch = await client.submit(requests(1))
        with pytest.raises(BatchConflict, match="follow=True"):
            _ = [result async for result in batch.results(follow=False)]
        with pytest.raises(TimeoutError, match="has not ended"):
            await batch.wait(0.05)


PROGRAM = """
import os

from producer import Client

client = Client()
parent = client.submit([{"prompt": f"question {n}"} for n in range(300)])
results = iter(parent.results())
first = next(results)
children = []
for _ in range(3):
    child = os.fork()
    if not child:
        own = client.submit([{"prompt": f"question {n}"} for n in range(200)])
        lines = sorted(result.line for result in own.results())
        theirs = sorted(result.line for result in parent.results())
        right = lines == [*range(1, 201)] and theirs == [*range(1, 301)]
        os._exit(0 if right else 1)
    children.append(child)
lines = sorted([first.line, *(result.line for result in results)])
print(lines == [*range(1, 301)], [os.waitpid(child, 0)[1] for child in children])
"""


@pytest.mark.timeout(120)
def test_each_process_gets_its_own_answers_and_all_of_them(redis_url: str, tmp_path: Path) -> None:
    with simulated(redis_url, tmp_path / "worker.log"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=producer_env(redis_url), cwd=tmp_path,
            capture_output=True, text=True, timeout=90, check=False,
        )  # fmt: skip
    assert done.stdout == "True [0, 0, 0]\n", done.stderr


def test_a_batch_that_is_not_there_has_an_error_of_its_own(client: Client) -> None:
    with pytest.raises(producer.BatchNotFound, match="there is no batch nope"):
        client.batch("nope")
    assert issubclass(producer.BatchNotFound, BatchConflict)


def test_a_queue_without_a_worker_is_named_at_once_and_by_a_wait(client: Client) -> None:
    with pytest.warns(UserWarning, match=r"no worker serves queue warmq\.qwen; the requests wait"):
        batch = client.submit([{"prompt": "x"}], model="qwen")
    with pytest.raises(TimeoutError, match=r"no worker serves queue warmq\.qwen"):
        batch.wait(timeout=0)
