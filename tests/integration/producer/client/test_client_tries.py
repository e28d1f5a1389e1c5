"""The client tries a few requests before all are submitted; nothing of them is left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from kit.commands.support import queued, run_all

from contract.errors import BatchConflict
from contract.redis.batches import BatchStore
from demo.stack import eventually
from producer import AsyncClient, Client
from producer.input.options import BadOption


@pytest.fixture
def client(redis_url: str) -> Iterator[Client]:
    with Client(redis_url) as client:
        yield client


def requests(count: int) -> list[dict[str, object]]:
    return [{"custom_id": f"r{n}", "prompt": f"question {n}"} for n in range(count)]


def answering(store: BatchStore, until: threading.Event) -> threading.Thread:
    """Answer all requests until the event is set."""

    def work() -> None:
        while not until.wait(0.02):
            run_all(store)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_rows_are_tried_and_nothing_of_them_is_left(client: Client, store: BatchStore) -> None:
    given = [*requests(300), {"custom_id": "hot", "prompt": "x", "temperature": 9}]
    done = threading.Event()
    worker = answering(store, done)
    trial = client.try_rows(given, 4, fields={"max_tokens": 5})
    done.set()
    worker.join(20)
    assert [row.line for row in trial.rows][:1] == [1]
    assert (trial.rows[0].prompt, trial.rows[0].text) == ("question 0", "answer to r0")
    assert (trial.requests, trial.bad) == (300, 1)
    assert trial.completion_tokens == 600
    assert trial.first_errors[0].startswith("request 301, field temperature")
    assert sum(trial.failures.values()) == sum(not row.ok for row in trial.rows)
    assert client.batches() == []
    assert client.submit(given).status().total == 301


def test_what_cannot_be_tried_is_refused_by_name(client: Client) -> None:
    with pytest.raises(BadOption, match="only once"):
        client.try_rows(iter(requests(3)))
    for rows in (0, 101, "5", True):
        with pytest.raises(BadOption, match=r"rows .*from 1 to 100"):
            client.try_rows(requests(3), rows)  # type: ignore[arg-type]
    with pytest.raises(BatchConflict, match="nothing to try"):
        client.try_rows([])
    assert client.batches() == []


def test_a_trial_that_is_cancelled_is_removed(redis_url: str, store: BatchStore) -> None:
    async def main() -> None:
        async with AsyncClient(redis_url) as client:
            trying = asyncio.create_task(client.try_rows(requests(30)))
            await asyncio.to_thread(eventually, lambda: len(queued(store)) == 20, 20)
            trying.cancel()
            with pytest.raises(asyncio.CancelledError):
                await trying

    asyncio.run(main())
    eventually(lambda: store.batches() == [], 20)
    assert queued(store) == []
