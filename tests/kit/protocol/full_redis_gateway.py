"""What is run in a full Redis, by script: the gateways'."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from kit.protocol.full_redis import CASES, Act, answers, of
from kit.protocol.lessee import QUEUE, Lessee, submit_batch

from contract import naming
from contract.message import write_online
from contract.openai.body import CHAT_URL
from contract.redis import keys
from contract.redis.batches import BatchStore
from contract.redis.connect import connect_async
from contract.redis.due import Due
from contract.redis.objects import Objects
from contract.redis.records import Records
from gateway.redis.api_keys import Sessions
from gateway.redis.batch_views import BatchViews, PartialOrder
from gateway.redis.idempotency import Answer, IdempotencyStore, Renewals
from gateway.redis.limits import Budgets, Rates, Take
from gateway.redis.online import OnlineRequests, Push, PushResult
from gateway.redis.responses import BackgroundResponses
from gateway.redis.webhooks import Delivery, Webhooks

__all__ = ["CASES"]
DOCUMENT = b'{"status":"in_progress"}'


def _awaited(url: str, ask: Callable[[Any], Awaitable[object]], make: Any) -> object:
    async def run() -> object:
        made = make(connect_async(url, "test"))
        try:
            return await ask(made)
        finally:
            await made.close()

    return asyncio.run(run())


@of("session_put")
def _session(store: BatchStore, worker: Lessee, url: str) -> Act:
    async def ask(sessions: Sessions) -> str:
        await sessions.begin("token", "digest")
        return await sessions.key_digest("token")

    return answers("digest", lambda: _awaited(url, ask, Sessions))


@of("rate")
def _rate(store: BatchStore, worker: Lessee, url: str) -> Act:
    async def ask(rates: Rates) -> bool:
        return (await rates.take([Take("k", 10, 100, 1, 1)]))[0].allowed

    return answers(True, lambda: _awaited(url, ask, Rates))


@of("idempotent_begin", "idempotent_end")
def _idempotent(store: BatchStore, worker: Lessee, url: str) -> Act:
    answer = Answer(200, {}, b"{}")

    async def ask(tries: IdempotencyStore) -> object:
        assert (await tries.begin("a", "f", "first")).state == "new"
        assert Renewals.using(store).renew([("a", "first")]) == [True]
        await tries.finish("a", "first", answer)
        return (await tries.begin("a", "f", "second")).answer

    return answers(answer, lambda: _awaited(url, ask, IdempotencyStore))


async def _pushed(live: OnlineRequests) -> list[PushResult]:
    body = orjson.dumps({"messages": [{"role": "user", "content": "x"}]})
    given: dict[str, Any] = {
        "queue": QUEUE, "priority": 0, "tenant": "t", "deadline": 4e9, "keep_ms": 5000,
    }  # fmt: skip
    text = write_online("a", CHAT_URL, body, **given)
    asked = [Push(naming.turn_list(QUEUE, 0, "t"), "a", None, text)]
    # The caller's mark decides what is too much, not maxmemory.
    return await live.push(asked, high_water=1e9, high_water_requests=1000)


def _live(url: str, ask: Callable[[OnlineRequests], Awaitable[object]]) -> object:
    async def run() -> object:
        live = OnlineRequests.open(url, "test")
        try:
            return await ask(live)
        finally:
            await live.close()

    return asyncio.run(run())


@of("push")
def _push(store: BatchStore, worker: Lessee, url: str) -> Act:
    return answers([PushResult()], lambda: _live(url, _pushed))


@of("revoke")
def _revoke(store: BatchStore, worker: Lessee, url: str) -> Act:
    _live(url, _pushed)

    def act() -> None:
        _live(url, lambda live: live.cancel(["a"]))
        assert worker.pop() == []

    return act


def _objects(store: BatchStore) -> Objects:
    """Return the objects of a gateway: a file, an upload and a batch."""
    objects = Objects.using(store)
    for kind in ("batch", "file", "upload"):
        assert objects.create(kind, "t", f"{kind}_1", 1000, DOCUMENT)
    return objects


@of("object_put")
def _object_put(store: BatchStore, worker: Lessee, url: str) -> Act:
    """A batch ends with its files, an upload is cancelled."""
    objects = _objects(store)

    def act() -> None:
        for kind in ("batch", "upload"):
            read = objects.get(kind, "t", f"{kind}_1")
            assert read is not None
            assert objects.replace(kind, "t", read, DOCUMENT * 2, 1000, 4_000_000_000)
        assert objects.create("file", "t", "file_output", 1001, DOCUMENT)

    return act


@of("object_delete")
def _object_delete(store: BatchStore, worker: Lessee, url: str) -> Act:
    objects = _objects(store)
    kinds = ("batch", "file", "upload")
    return answers([True] * 3, lambda: [objects.delete(k, "t", f"{k}_1") for k in kinds])


@of("object_page")
def _object_page(store: BatchStore, worker: Lessee, url: str) -> Act:
    """One of the files has expired, which the list tidies up."""
    objects = _objects(store)
    store._client.zadd("warmq:gateway:files:t", {"file_gone": 999})

    def act() -> None:
        page = objects.page("file", "t", limit=10)
        assert page is not None
        assert [found.id for found in page.objects] == ["file_1"]

    return act


@of("batch_views")
def _batch_views(store: BatchStore, worker: Lessee, url: str) -> Act:
    _objects(store)
    submit_batch(store, 1, batch_id="b1", tenant="t")
    views = BatchViews.using(store)

    def act() -> None:
        page = views.page("t", limit=10)
        assert page is not None
        assert "batch_1" in [view.id for view in page.batches]
        assert views.get("t", "batch_1") is not None

    return act


@of("objects_gone")
def _objects_gone(store: BatchStore, worker: Lessee, url: str) -> Act:
    _objects(store)
    store._client.delete("warmq:gateway:file:file_1")
    return answers(1, lambda: Records.using(store).forget_gone("t"))


@of("note_reader")
def _note_reader(store: BatchStore, worker: Lessee, url: str) -> Act:
    objects = _objects(store)

    def act() -> None:
        objects.note_reader("file_1", "batch_1")
        assert objects.is_read("file_1")
        objects.forget_reader("file_1", "batch_1")
        assert not objects.has_reader("file_1")

    return act


@of("note_bytes")
def _note_bytes(store: BatchStore, worker: Lessee, url: str) -> Act:
    budgets = Budgets.using(store)
    assert budgets.note_bytes("t", "file_1", 10, None) is None

    def act() -> None:
        assert budgets.note_bytes("t", "file_2", 5, None) is None
        assert budgets.note_bytes("", "file_1", 0, None) is None
        assert budgets.stored_bytes("t") == 5

    return act


@of("give_back")
def _give_back(store: BatchStore, worker: Lessee, url: str) -> Act:
    budgets = Budgets.using(store)
    assert budgets.reserve("t", "batch_1", {"m": 10}, None) is None
    return answers(True, lambda: budgets.give_back("batch_1"))


@of("due_set", "due_claim", "due_release")
def _due(store: BatchStore, worker: Lessee, url: str) -> Act:
    due = Due.using(store)
    due.add("batch", "batch_1")

    def act() -> None:
        due.add("batch", "batch_2")
        claims = due.claim("batch", 1000, 10)
        assert {claim.id for claim in claims} == {"batch_1", "batch_2"}
        assert due.renew(claims[:1], 1000) == [True]
        assert due.release(claims[0], 0)
        assert due.finish(claims[1])

    return act


@of("partial_order")
def _partial_order(store: BatchStore, worker: Lessee, url: str) -> Act:
    parts = [submit_batch(store, 2, batch_id=name).batch for name in ("b1", "b2")]
    worker.done(*worker.pop())
    order = PartialOrder.using(store)
    return answers(4, lambda: order.segments("batch_1", parts, 0, 60_000)[0])


def _responses(store: BatchStore) -> BackgroundResponses:
    """Return the background responses, of which there is one."""
    responses = BackgroundResponses.using(store)
    life = {"life_ms": 60_000, "look_ms": 1000}
    assert responses.create("resp_1", "t", 1000, DOCUMENT, b"{}", **life)
    return responses


@of("response_push")
def _response_push(store: BatchStore, worker: Lessee, url: str) -> Act:
    responses, list_key = _responses(store), naming.turn_list(QUEUE, 6, "t")

    def act() -> None:
        # The caller's mark decides what is too much, not maxmemory.
        limits = {"high_water": 1e9, "high_water_requests": 1000}
        assert responses.push("resp_1", list_key, b"{}", **limits) == ""  # type: ignore[arg-type]
        found = responses.get("resp_1")
        assert found is not None
        assert found.pushed

    return act


@of("response_cancel")
def _response_cancel(store: BatchStore, worker: Lessee, url: str) -> Act:
    responses = _responses(store)
    return answers(True, lambda: responses.cancel("resp_1", "t", keep_ms=1000, revoked_s=60))


@of("response_ended")
def _response_ended(store: BatchStore, worker: Lessee, url: str) -> Act:
    responses = _responses(store)
    store._client.set(keys.result_key("1"), "{}", px=60_000)

    def act() -> None:
        responses.note_end("resp_1")
        found = responses.get("resp_1")
        assert found is not None
        assert found.noted

    return act


@of("webhook_put")
def _webhook_put(store: BatchStore, worker: Lessee, url: str) -> Act:
    """A delivery is noted and written; its endpoint is deleted."""
    webhooks = Webhooks.using(store)
    endpoint = webhooks.create("t", "https://example.com", ("batch.completed",))
    delivery = Delivery(
        id="wh_1", endpoint_id=endpoint.id, batch_id="b", event="batch.completed", created_at=1
    )

    def act() -> None:
        webhooks.note(delivery)
        delivery.tries = 1
        webhooks.write(delivery)
        assert webhooks.delivery("wh_1") == delivery
        assert webhooks.delete(endpoint.id)
        assert webhooks.all() == []

    return act
