"""Results asked for ahead: as good as asked for at once, whatever becomes of the connection."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from kit.commands.support import finish
from kit.protocol.lessee import Lessee, client_of, submit_batch

from contract import naming
from contract.errors import StoreUnavailable
from contract.redis.batches import BatchStore
from contract.redis.connect import connect
from demo.stack import RedisServer
from producer.redis import ResultPrefetch


def finished(store: BatchStore) -> list[str]:
    """Finish a batch, and return its request ids."""
    submit_batch(store, 3)
    lessee = Lessee(client_of(store))
    finish(lessee, lessee.pop())
    return [naming.request_id("b1", f"c{n}") for n in (1, 2, 3)]


@pytest.fixture
def ids(store: BatchStore) -> list[str]:
    return finished(store)


def test_an_answer_is_what_the_store_says(store: BatchStore, ids: list[str]) -> None:
    asked = [ids[1], naming.request_id("b1", "none"), ids[0]]
    with closing(ResultPrefetch(store)) as ahead:
        ahead.ask(asked)
        assert ahead.answer() == store.results(asked)
        ahead.ask(ids)
        assert None not in ahead.answer()


def test_a_connection_that_breaks_before_the_answer_costs_nothing(
    own: RedisServer, own_store: BatchStore
) -> None:
    ids = finished(own_store)
    with own.client() as client, closing(ResultPrefetch(own_store)) as ahead:
        ahead.ask(ids)
        client.client_kill_filter(_type="normal", skipme=True)
        assert ahead.answer() == own_store.results(ids)
        ahead.ask(ids)  # on a new connection
        client.client_kill_filter(_type="normal", skipme=True)
        assert None not in ahead.answer()


def test_an_answer_that_nobody_read_is_not_the_next_one(store: BatchStore, ids: list[str]) -> None:
    with closing(ResultPrefetch(store)) as ahead:
        ahead.ask(ids)
    assert client_of(store).ping() is True
    with closing(ResultPrefetch(store)) as ahead:
        ahead.ask(ids[:1])
        assert len(ahead.answer()) == 1


def test_a_redis_that_is_gone_is_said_as_the_store_says_it(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        store = BatchStore(connect(server.url, "test", retries=0), ttl_ms=1000)
        server.stop()
        with closing(ResultPrefetch(store)) as ahead:
            ahead.ask(["r1"])
            with pytest.raises(StoreUnavailable):
                ahead.answer()
