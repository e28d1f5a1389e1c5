"""Many long calls of `AsyncClient` at once: each has a thread of its own, and none stays."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from kit.commands.support import finish, producer_env
from kit.protocol.lessee import Lessee, client_of
from kit.stacks.celery_side import simulated

from contract.redis.batches import BatchStore
from demo.stack import eventually
from producer import AsyncClient

#: More than asyncio's own executor has threads.
MANY = min(32, (os.cpu_count() or 1) + 4) + 1
LONG_S = 30


def requests(count: int) -> list[dict[str, Any]]:
    return [{"custom_id": f"r{n}", "prompt": f"question {n}"} for n in range(count)]


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Any:
    """Fail where a thread that a test has begun goes on after it."""
    before = set(threading.enumerate())
    yield
    gc.collect()  # iterators that nobody has closed
    eventually(lambda: not set(threading.enumerate()) - before, 10, "threads have ended")


async def test_calls_that_wait_hold_up_neither_others_nor_the_program(
    redis_url: str, store: BatchStore
):
    async with AsyncClient(redis_url) as client:
        batch = await client.submit(requests(2))
        lessee = Lessee(client_of(store))
        finish(lessee, lessee.pop(1))
        readers = [batch.results() for _ in range(MANY)]
        waiting = [asyncio.create_task(batch.wait()) for _ in range(MANY)]
        async with asyncio.timeout(LONG_S):
            firsts = [await anext(reader) for reader in readers]
            assert {first.custom_id for first in firsts} == {"r0"}
            assert await asyncio.to_thread(int, "7") == 7
            assert await batch.cancel() == 1
            for reader in readers:
                assert [r.error and r.error.code async for r in reader] == ["cancelled"]
            assert {status.status for status in await asyncio.gather(*waiting)} == {"cancelled"}


async def test_iterables_that_give_nothing_for_long_hold_up_no_other_call(redis_url: str):
    begun, go_on = asyncio.Semaphore(0), asyncio.Event()

    async def slow() -> AsyncIterator[dict[str, Any]]:
        begun.release()
        yield {"prompt": "x"}
        await go_on.wait()
        yield {"prompt": "y"}

    async with AsyncClient(redis_url) as client:
        submitting = [asyncio.create_task(client.submit(slow())) for _ in range(MANY)]
        async with asyncio.timeout(LONG_S):
            for _ in range(MANY):
                await begun.acquire()
            assert len(await client.batches()) == MANY
            go_on.set()
            batches = await asyncio.gather(*submitting)
            assert {(await batch.status()).total for batch in batches} == {2}


async def test_calls_beyond_a_hundred_wait_too_for_a_redis_that_is_slow(
    redis_url: str, store: BatchStore
):
    async with AsyncClient(redis_url) as client:
        batch = await client.submit(requests(1))
        client_of(store).execute_command("CLIENT", "PAUSE", "2000", "ALL")
        waiting = [asyncio.create_task(batch.wait()) for _ in range(120)]
        async with asyncio.timeout(LONG_S):
            assert await batch.cancel() == 1
            assert {status.status for status in await asyncio.gather(*waiting)} == {"cancelled"}


async def test_a_call_that_is_cancelled_ends_at_once_and_its_thread_soon(
    redis_url: str, store: BatchStore
):
    before = threading.active_count()

    async def endless() -> AsyncIterator[dict[str, Any]]:
        yield {"prompt": "x"}
        await asyncio.Event().wait()

    async with AsyncClient(redis_url) as client:
        batch = await client.submit(requests(1))
        results = batch.results()
        calls: list[Any] = [batch.wait(), anext(results), client.submit(endless())]
        tasks = [asyncio.ensure_future(call) for call in calls]
        await asyncio.to_thread(
            eventually, lambda: threading.active_count() >= before + 4, 10, "all calls wait"
        )
        for task in tasks:
            task.cancel()
        done, _ = await asyncio.wait(tasks, timeout=2)
        assert [task.cancelled() for task in done] == [True] * 3
        assert (await batch.status()).pending == 1


def test_a_loop_that_ends_without_its_calls_leaves_no_thread(redis_url: str) -> None:
    loop = asyncio.new_event_loop()
    client = AsyncClient(redis_url)
    batch = loop.run_until_complete(client.submit(requests(1)))
    waiting = loop.create_task(batch.wait())
    loop.run_until_complete(asyncio.wait([waiting], timeout=0.1))
    loop.close()  # and nobody has cancelled the task
    eventually(lambda: not _own_threads(), 10, "the thread has ended")
    client._client.close()


def _own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "warmq-client"]


PROGRAM = """
import asyncio
import os

from producer import AsyncClient


async def lines(batch):
    return sorted([result.line async for result in batch.results()])


async def own(client, batch_id):
    batch = await client.submit([{"prompt": f"question {n}"} for n in range(200)])
    theirs = await lines(await client.batch(batch_id))
    return await lines(batch) == [*range(1, 201)] and theirs == [*range(1, 301)]


async def main():
    client = AsyncClient()
    batch = await client.submit([{"prompt": f"question {n}"} for n in range(300)])
    results = batch.results()
    first = await anext(results)
    children = []
    for _ in range(3):
        child = os.fork()
        if not child:
            asyncio.events._set_running_loop(None)
            os._exit(0 if asyncio.run(own(client, batch.id)) else 1)
        children.append(child)
    found = sorted([first.line, *[result.line async for result in results]])
    ended = [(await asyncio.to_thread(os.waitpid, child, 0))[1] for child in children]
    print(found == [*range(1, 301)], ended)


asyncio.run(main())
"""


@pytest.mark.timeout(120)
def test_a_process_that_was_forked_among_waiting_calls_gets_its_own_answers(
    redis_url: str, tmp_path: Path
) -> None:
    with simulated(redis_url, tmp_path / "worker.log"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=producer_env(redis_url), cwd=tmp_path,
            capture_output=True, text=True, timeout=90, check=False,
        )  # fmt: skip
    assert done.stdout == "True [0, 0, 0]\n", done.stderr
