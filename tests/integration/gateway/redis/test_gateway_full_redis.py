"""Where Redis is full, gateways answer reads, cancel, delete and end; only what is new waits."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

import pytest
import redis
from kit.protocol.lessee import submit_batch

from contract.errors import StoreFull
from contract.redis.batches import BatchStore
from contract.redis.connect import connect_async
from contract.redis.due import Due
from contract.redis.objects import Objects, Stored
from contract.redis.scripts import PACKAGES, SHARED
from contract.redis.tenants import Tenant, Tenants
from demo.stack import ROOT, RedisServer
from gateway.redis.api_keys import ApiKeys
from gateway.redis.batch_views import BatchViews, PartialOrder
from gateway.redis.idempotency import Answer, IdempotencyStore, Renewals
from gateway.redis.limits import Rates, Take
from gateway.redis.webhooks import Delivery, Webhooks

DOCUMENT = b'{"status":"in_progress"}'


def refuse_by_memory(server: RedisServer) -> None:
    client = server.client()
    client.config_set("maxmemory", client.info("memory")["used_memory"] // 2)
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        client.set("x", "y")


def refuse_as_replica(server: RedisServer) -> None:
    server.client().replicaof("127.0.0.1", "1")


@pytest.fixture
def made(own: RedisServer, own_store: BatchStore) -> Iterator[Objects]:
    """Return the objects of a Redis with two batches, a file and work of each kind."""
    objects = Objects.using(own_store)
    for kind in ("batch", "file", "upload"):
        objects.create(kind, "default", f"{kind}_1", 1000, DOCUMENT)
        Due.using(own_store).add(kind, f"{kind}_1")
    submit_batch(own_store, 2, batch_id="b1")
    submit_batch(own_store, 2, batch_id="b2")
    own_store.cancel(own_store.batch("b1"))  # type: ignore[arg-type]
    yield objects


@pytest.mark.parametrize("refuse", [refuse_by_memory, refuse_as_replica])
def test_reads_are_answered_where_redis_takes_no_write(
    own: RedisServer, own_store: BatchStore, made: Objects, refuse: object
) -> None:
    views, order = BatchViews.using(own_store), PartialOrder.using(own_store)
    parts = [own_store.batch(name) for name in ("b1", "b2")]
    own.client().zadd("warmq:gateway:files:default", {"file_gone": 999})
    refuse(own)  # type: ignore[operator]
    page = views.page("default", limit=10)
    assert page is not None
    assert "batch_1" in [view.id for view in page.batches]
    assert views.get("default", "batch_1") is not None
    assert views.get("default", "b1") is not None
    files = made.page("file", "default", limit=10)
    assert files is not None
    assert [stored.id for stored in files.objects] == ["file_1"]
    order.segments("batch_1", parts, 0, 60_000)  # type: ignore[arg-type]


def test_what_is_there_is_cancelled_ended_and_deleted_in_a_full_redis(
    own: RedisServer, own_store: BatchStore, made: Objects
) -> None:
    due = Due.using(own_store)
    refuse_by_memory(own)
    batch = made.get("batch", "default", "batch_1")
    assert batch is not None
    changed = made.replace("batch", "default", batch, DOCUMENT * 2, 1000)
    assert changed is not None
    due.add("batch", "batch_2")
    claims = due.claim("batch", 1000, 10)
    assert {claim.id for claim in claims} == {"batch_1", "batch_2"}
    assert due.renew(claims[:1], 1000) == [True]
    assert due.release(claims[0], 0)
    assert due.finish(claims[1])
    assert made.create("file", "default", "file_output", 1001, DOCUMENT)
    made.note_reader("file_1", "batch_1")
    assert made.has_reader("file_1")
    assert made.delete("file", "default", "file_1")
    assert made.delete("batch", "default", "batch_1")
    webhooks, delivery = (
        Webhooks.using(own_store),
        Delivery(
            id="wh_1", endpoint_id="we_1", batch_id="batch_1", event="batch.completed", created_at=1
        ),
    )
    webhooks.note(delivery)
    delivery.tries = 1
    webhooks.write(delivery)
    assert webhooks.delivery("wh_1") == delivery
    assert own_store.retry(own_store.batch("b1"), ["cancelled"]) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["batch", "upload"])
def test_nothing_new_begins_in_a_full_redis(own: RedisServer, made: Objects, kind: str) -> None:
    refuse_by_memory(own)
    with pytest.raises(StoreFull):
        made.create(kind, "default", f"{kind}_2", 1001, DOCUMENT)  # type: ignore[arg-type]
    assert made.replace("file", "default", Stored("none", DOCUMENT, 3), DOCUMENT, 1) is None


def test_posts_and_rates_of_a_full_redis(own: RedisServer, own_store: BatchStore) -> None:
    async def run() -> None:
        tries = IdempotencyStore(connect_async(own.url, "test"))
        assert (await tries.begin("a", "f", "first")).state == "new"
        assert Renewals.using(own_store).renew([("a", "first")]) == [True]
        await tries.finish("a", "first", Answer(200, {}, b"{}"))
        assert (await tries.begin("a", "f", "second")).answer == Answer(200, {}, b"{}")
        rates = Rates(connect_async(own.url, "test"))
        (taken,) = await rates.take([Take("k", 10, 100, 1, 1)])
        assert taken.allowed
        await tries.close()
        await rates.close()

    refuse_by_memory(own)
    asyncio.run(run())


LUA = {path.stem: path for side in PACKAGES for path in (ROOT / side / "lua").iterdir()}
#: Scripts that a full Redis may refuse, or that see to it by themselves.
NOT_FIRST = {
    "create": "makes a batch: only one that is made to be ended passes",
    "enqueue": "looks first whether the caller's mark is reached",
    "enqueue_planned": "as enqueue",
    "object_put": "what is new waits, but for files of batches that end",
    "reserve": "makes a batch",
    "response_create": "makes a response",
    "know": "an answer that is not noted is computed again",
    "list": "writes nothing",
    "run_state": "writes nothing",
    "permissions": "tries what Redis refuses",
}
#: What frees memory passes as a first write, too.
WRITES = re.compile(
    r"\b(allow_when_full|may_write)\(\)|redis\.p?call\('([A-Z]+)'|call_many\('([A-Z]+)'"
)
FREE = {"DEL", "UNLINK", "ZREM", "HDEL", "SREM", "LPOP", "PERSIST", "PEXPIRE"}
READ = {"GET", "HGET", "HMGET", "EXISTS", "HEXISTS", "LINDEX", "LLEN", "ZSCORE", "SMEMBERS"}


SCRIPTS = LUA.keys() - set(SHARED)


@pytest.mark.parametrize("script", sorted(SCRIPTS - NOT_FIRST.keys()))
def test_every_script_frees_before_it_may_be_refused(script: str) -> None:
    text = re.sub(r"--.*", "", LUA[script].read_text())
    # What stands in functions is called further down.
    body = re.sub(r"(?ms)^local function [^\n]*\n.*?^end\n", "", text)
    found = [next(filter(None, match.groups())) for match in WRITES.finditer(body)]
    first = next(word for word in found if word not in READ)
    assert first in ("allow_when_full", "may_write", *FREE), f"{script} begins with {first}"


def test_an_operator_ends_what_has_filled_redis(
    own: RedisServer, own_store: BatchStore, made: Objects
) -> None:
    """Keys are revoked, tenants capped, batches cancelled and deleted, results retired."""
    key, record = ApiKeys.using(own_store).create("t")
    assert key
    refuse_by_memory(own)
    revoked = ApiKeys.using(own_store).revoke(record.id)
    assert revoked is not None
    assert revoked.revoked_at is not None
    tenants = Tenants.using(own_store)
    tenants.set_tenant(Tenant("t", 1, 1))
    assert tenants.tenant("t").max_in_flight == 1
    assert own_store.cancel(own_store.batch("b2")) == 2  # type: ignore[arg-type]
    for name in ("b1", "b2"):
        own_store.delete(name, force=True)
        assert own_store.batch(name) is None
    assert own.client().zcard("warmq:batches") == 0
