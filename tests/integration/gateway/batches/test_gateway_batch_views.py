"""Batches as the gateways read them: one list for what came over HTTP and what was submitted."""

from __future__ import annotations

import pytest
import redis
from kit.protocol.lessee import submit_batch

from contract.batch import Batch
from contract.errors import ProtocolMismatch
from contract.redis import keys
from contract.redis.batches import BatchStore
from contract.redis.objects import Objects, Stored
from gateway.batches.api.record import BatchPart, BatchRecord, RequestCounts, encode
from gateway.http.errors import api_error
from gateway.redis.batch_views import BatchViews


@pytest.fixture
def views(store: BatchStore) -> BatchViews:
    """Return the views of the private Redis."""
    return BatchViews.using(store)


def put(
    store: BatchStore, batch_id: str, created: int = 1000, tenant: str = "default", **fields: object
) -> BatchRecord:
    """Write a batch as a gateway does."""
    record = BatchRecord(
        id=batch_id, tenant=tenant, endpoint="/v1/chat/completions", input_file_id="file-1",
        completion_window="24h", created_at=created, expires_at=created + 86400, **fields,
    )  # fmt: skip
    Objects.using(store).create("batch", tenant, batch_id, created, encode(record))
    return record


def listed(views: BatchViews, owner: str = "default", limit: int = 3) -> list[str]:
    """Return the ids of all pages, as the SDKs go through them."""
    ids: list[str] = []
    while True:
        page = views.page(owner, after=ids[-1] if ids else "", limit=limit)
        assert page is not None
        assert len(page.batches) == limit or not page.has_more
        ids += [view.id for view in page.batches]
        if not page.has_more:
            return ids


def created_s(store: BatchStore, batch_id: str) -> int:
    batch = store.batch(batch_id)
    assert batch is not None
    return int(batch.created) // 1000


def test_submitted_batches_and_those_over_http_are_one_list_newest_first(
    store: BatchStore, views: BatchViews
) -> None:
    submit_batch(store, batch_id="s1")
    now = created_s(store, "s1")
    for n in range(5):
        put(store, f"batch_0{n}", now - 10 + n)
    put(store, "batch_new", now + 10)
    assert listed(views) == ["batch_new", "s1", *(f"batch_0{n}" for n in reversed(range(5)))]
    submit_batch(store, batch_id="s2")
    assert listed(views)[:3] in (["batch_new", "s2", "s1"], ["batch_new", "s1", "s2"])


def test_batches_of_one_second_are_in_the_order_of_their_ids(
    store: BatchStore, views: BatchViews
) -> None:
    names = [f"batch_{n:02}" for n in range(20)]
    for name in names:
        put(store, name)
    assert listed(views) == sorted(names, reverse=True)


def test_an_owner_sees_and_pages_over_his_own_alone(store: BatchStore, views: BatchViews) -> None:
    put(store, "batch_mine", tenant="a")
    put(store, "batch_theirs", tenant="b")
    submit_batch(store, batch_id="s_a", tenant="a")
    submit_batch(store, batch_id="s_b", tenant="b")
    assert listed(views, "a") == ["s_a", "batch_mine"]
    assert listed(views, "b") == ["s_b", "batch_theirs"]
    assert listed(views, "c") == []
    for foreign in ("batch_theirs", "s_b", "nothing", ""):
        assert foreign == "" or views.page("a", after=foreign, limit=5) is None
        assert views.get("a", foreign or "x") is None


def test_the_queues_batches_of_one_over_http_are_not_listed_beside_it(
    store: BatchStore, views: BatchViews
) -> None:
    put(store, "batch_1")
    submit_batch(store, batch_id="batch_1")
    submit_batch(store, batch_id="batch_1.0")
    submit_batch(store, batch_id="batch_1.1")
    submit_batch(store, batch_id="own.1")  # its name alone makes no part of it
    assert listed(views) == ["own.1", "batch_1"]
    assert views.get("default", "batch_1.1") is None
    assert views.get("default", "own.1") is not None


def test_a_running_batch_comes_with_the_counters_of_its_parts(
    store: BatchStore, views: BatchViews, redis_client: redis.Redis
) -> None:
    parts = [BatchPart("batch_1", "m", "warmq.m"), BatchPart("batch_1.1", "n", "warmq.n")]
    put(store, "batch_1", status="in_progress", parts=parts, counts=RequestCounts(total=5))
    submit_batch(store, batch_id="batch_1")
    redis_client.hset("warmq:batch:batch_1", "completed", 2)
    view = views.get("default", "batch_1")
    assert view is not None
    assert isinstance(view.source, Stored)
    first, second = view.parts
    assert (first.number("total"), first.terminal, second.fields) == (3, 2, {})


def test_an_ended_batch_is_read_without_its_parts(store: BatchStore, views: BatchViews) -> None:
    put(store, "batch_1", status="completed", parts=[BatchPart("batch_1", "m", "warmq.m")])
    view = views.get("default", "batch_1")
    assert view is not None
    assert view.parts == []


def test_metadata_that_looks_like_parts_changes_nothing(
    store: BatchStore, views: BatchViews
) -> None:
    put(store, "batch_1", metadata={"parts": '"parts":[{"batch_id":"x"', "status": "completed"})
    view = views.get("default", "batch_1")
    assert view is not None
    assert view.parts == []


def test_anthropics_batches_are_not_in_this_list(store: BatchStore, views: BatchViews) -> None:
    for n in range(30):
        put(store, f"msgbatch_{n:02}", 1000 + n, api="anthropic")
        if n % 10 == 0:
            put(store, f"batch_{n:02}", 1000 + n)
    assert listed(views, limit=2) == ["batch_20", "batch_10", "batch_00"]
    assert views.page("default", after="msgbatch_05", limit=2) is None


def test_a_deleted_batch_leaves_the_list(store: BatchStore, views: BatchViews) -> None:
    for name in ("s1", "s2", "s3"):
        submit_batch(store, batch_id=name)
    assert len(listed(views)) == 3
    store.delete("s2", force=True)
    assert sorted(listed(views)) == ["s1", "s3"]
    assert views.page("default", after="s2", limit=5) is None


def test_a_page_that_ends_before_what_has_expired_says_that_nothing_follows(
    store: BatchStore, views: BatchViews, redis_client: redis.Redis
) -> None:
    for n in range(4):
        put(store, f"batch_{n}", 1000 + n)
    redis_client.delete("warmq:gateway:batch:batch_0")
    page = views.page("default", limit=3)
    assert page is not None
    assert ([view.id for view in page.batches], page.has_more) == (
        ["batch_3", "batch_2", "batch_1"], False
    )  # fmt: skip


def test_a_batch_submitted_anew_is_listed_by_its_new_time_and_owner(
    store: BatchStore, views: BatchViews, redis_client: redis.Redis
) -> None:
    submit_batch(store, batch_id="s1", tenant="a")
    assert listed(views, "a") == ["s1"]
    store.delete("s1", force=True)
    submit_batch(store, batch_id="s1", tenant="b")
    assert (listed(views, "a"), listed(views, "b")) == ([], ["s1"])
    assert redis_client.zcard("warmq:gateway:batchs:a") == 0


def test_many_batches_of_before_there_was_a_gateway_are_all_listed(
    store: BatchStore, views: BatchViews, redis_client: redis.Redis
) -> None:
    pipe = redis_client.pipeline()
    for n in range(2500):
        at = 1_700_000_000_000 + n * 7
        pipe.hset(f"warmq:batch:s{n:04}", mapping={"created_at": at, "total": 1})
        pipe.zadd("warmq:batches", {f"s{n:04}": at})
    pipe.execute()
    assert listed(views, limit=100) == sorted((f"s{n:04}" for n in range(2500)), reverse=True)


def test_batches_are_listed_after_redis_clock_stepped_back(
    store: BatchStore, views: BatchViews, redis_client: redis.Redis
) -> None:
    submit_batch(store, batch_id="s1")
    assert listed(views) == ["s1"]
    redis_client.set("warmq:gateway:listed_until", store.now_ms() + 3_600_000)
    submit_batch(store, batch_id="s2")
    assert sorted(listed(views)) == ["s1", "s2"]


def test_lists_that_nobody_reads_do_not_keep_what_has_gone(
    store: BatchStore, views: BatchViews, redis_client: redis.Redis
) -> None:
    for n in range(50):
        submit_batch(store, batch_id=f"s{n}", tenant="silent")
        views.page("reader", limit=1)
        store.delete(f"s{n}", force=True)
    assert redis_client.zcard("warmq:gateway:batchs:silent") <= 2


def test_an_id_that_leads_to_another_key_is_no_batch(
    store: BatchStore, views: BatchViews, redis_client: redis.Redis
) -> None:
    submit_batch(store, batch_id="s1")
    redis_client.set("warmq:batch:forged", "x")
    redis_client.zadd("warmq:batches", {"forged": 5})
    for wrong in ("s1:index", "forged", "\0", "x" * 10_000):
        assert views.get("default", wrong) is None
    assert listed(views) == ["s1"]


def test_a_submitted_batch_comes_with_its_state(store: BatchStore, views: BatchViews) -> None:
    submit_batch(store, 3, batch_id="s1")
    view = views.get("default", "s1")
    assert view is not None
    assert isinstance(view.source, Batch)
    assert view.source.number("total") == 3
    assert view.source.status == "in_progress"


def test_a_batch_of_the_first_release_is_refused_in_words(
    redis_client: redis.Redis, store: BatchStore, views: BatchViews
) -> None:
    submit_batch(store, 1)
    redis_client.hdel(keys.batch_key("b1"), "life")
    with pytest.raises(ProtocolMismatch, match=r"0\.1\.0") as caught:
        views.get("default", "b1")
    told = api_error(caught.value)
    assert (told.status, told.code) == (409, "protocol_mismatch")


def test_without_keys_the_batches_of_all_tenants_are_one_list(
    store: BatchStore, views: BatchViews
) -> None:
    put(store, "batch_0", 1)
    submit_batch(store, batch_id="s1", tenant="x")
    assert listed(views) == ["batch_0"]
    assert listed(views, "") == ["s1", "batch_0"]
    assert views.get("", "s1") is not None
    assert views.get("default", "s1") is None
    submit_batch(store, batch_id="s2", tenant="y")
    assert sorted(listed(views, "")) == ["batch_0", "s1", "s2"]
    # Keys were made: each tenant's list is its own again.
    assert listed(views) == ["batch_0"]
    assert (listed(views, "x"), listed(views, "y")) == (["s1"], ["s2"])
