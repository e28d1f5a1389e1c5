"""Background responses in Redis: queued once whatever dies, and gone when their time is over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis
from kit.gateways.own_batch_runner import opened
from kit.protocol.lessee import QUEUE, Lessee
from kit.verdicts.owners import ownerless

from contract.errors import BatchConflict, RequestFailed, StoreFull, StoreUnreachable
from contract.openai.body import RESPONSES_URL
from contract.redis import keys
from contract.results import failure_meta
from gateway.http.caller import Caller
from gateway.http.errors import ApiError
from gateway.http.services import Services
from gateway.online.request import read
from gateway.online.responses import calls
from gateway.online.responses.record import GRACE_S, WINDOW_S, decode, encode
from gateway.redis.responses import BackgroundResponses, request_id_of, response_key
from gateway.sweeping import forget_records, look_at_responses
from producer.redis import delete_record, tenant_records

CALLER = Caller(tenant="t")
RESULT_TTL_S = 60


@pytest.fixture
def services(redis_url: str, tmp_path: Path) -> Iterator[Services]:
    with opened(redis_url, tmp_path, result_ttl_s=RESULT_TTL_S) as found:
        yield found


class Died(BaseException):
    """The process is gone; nothing that catches errors runs after it."""


def create(
    services: Services, caller: Caller = CALLER, *, key: str = "", **fields: Any
) -> dict[str, Any]:
    body = {"model": "m", "input": "Hello", "background": True, "max_output_tokens": 10} | fields
    return calls.create(services, caller, read(RESPONSES_URL, orjson.dumps(body), 0), QUEUE, key)


def waiting(services: Services) -> list[Any]:
    """Return the messages that wait in the queue."""
    client = services.batches._client
    found = [client.lrange(key, 0, -1) for key in services.batches.queue_lengths(QUEUE)]
    return [orjson.loads(raw) for raws in found for raw in raws]


def look_now(services: Services) -> int:
    """Do what a gateway does once the responses are due."""
    client, due = services.batches._client, "warmq:gateway:due:response"
    if names := client.zrange(due, 0, -1):
        client.zadd(due, dict.fromkeys(names, 1), xx=True)
    return look_at_responses(services)


def reserved(services: Services) -> dict[str, int]:
    raw = services.batches._client.hgetall("warmq:gateway:enqueued:t")
    return {model.decode(): int(tokens) for model, tokens in raw.items()}


def end(services: Services, response_id: str, meta: bytes = b"") -> None:
    """Store a result as a worker does."""
    request_id = request_id_of(response_id)
    meta = meta or failure_meta(request_id, RequestFailed("it failed"))
    services.batches._client.set(keys.result_key(request_id), meta, px=RESULT_TTL_S * 1000)


def only_id(redis_client: redis.Redis) -> str:
    (key,) = redis_client.keys("warmq:gateway:response:*")
    return key.decode().rpartition(":")[2]


def test_a_new_response_waits_as_one_message_with_its_id(services: Services) -> None:
    made = create(services, metadata={"a": "b"})
    (message,) = waiting(services)
    assert made["id"] == f"resp_{message['headers']['id']}"
    assert (made["status"], made["metadata"]) == ("queued", {"a": "b"})
    assert orjson.loads(message["body"])[0][0] == {
        "model": "m", "input": "Hello", "max_output_tokens": 10, "metadata": {"a": "b"},
    }  # fmt: skip
    ours = message["headers"]["warmq"]
    assert (ours["tenant"], ours["url"], ours["keep_ms"]) == ("t", RESPONSES_URL, 60_000)
    assert ours["deadline"] == pytest.approx(services.clock.now() + WINDOW_S, abs=5)
    assert message["properties"]["priority"] == 6
    assert look_now(services) == 0
    assert len(waiting(services)) == 1


def test_a_gateway_that_dies_between_record_and_push_loses_nothing_and_doubles_nothing(
    services: Services, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object, **__: object) -> None:
        raise Died

    with monkeypatch.context() as patch:
        patch.setattr(BackgroundResponses, "push", die)
        with pytest.raises(Died):
            create(services)
    response_id = only_id(redis_client)
    assert waiting(services) == []
    assert calls.retrieve(services, CALLER, response_id)["status"] == "queued"
    look_now(services)
    look_now(services)
    (message,) = waiting(services)
    assert f"resp_{message['headers']['id']}" == response_id


@pytest.mark.parametrize("queued", [False, True])
def test_a_lost_connection_while_it_is_pushed_is_no_error_of_the_caller(
    services: Services, monkeypatch: pytest.MonkeyPatch, queued: bool
) -> None:
    push = BackgroundResponses.push

    def lose(*args: Any, **options: Any) -> str:
        if queued:
            push(*args, **options)
        raise StoreUnreachable("Redis: connection lost")

    with monkeypatch.context() as patch:
        patch.setattr(BackgroundResponses, "push", lose)
        assert create(services)["status"] == "queued"
    assert len(waiting(services)) == int(queued)
    look_now(services)
    assert len(waiting(services)) == 1


def test_a_full_queue_takes_no_response_and_nothing_stays(
    redis_url: str, redis_client: redis.Redis, tmp_path: Path
) -> None:
    with opened(redis_url, tmp_path, high_water_requests=2) as services:
        create(services)
        create(services)
        held = reserved(services)
        with pytest.raises(StoreFull):
            create(services)
        assert len(redis_client.keys("warmq:gateway:response:*")) == 2
        assert len(waiting(services)) == 2
        assert reserved(services) == held
        look_now(services)
        assert redis_client.zcard("warmq:gateway:due:response") == 2
        assert ownerless(redis_client) == {}


def test_a_request_that_finds_the_queue_full_after_a_crash_is_pushed_later(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker: Lessee
) -> None:
    with opened(redis_url, tmp_path, high_water_requests=1) as services:
        with monkeypatch.context() as patch:
            patch.setattr(BackgroundResponses, "push", lambda *_, **__: "")
            late = create(services)
        create(services)
        look_now(services)
        assert len(waiting(services)) == 1
        worker.done(*worker.pop())
        look_now(services)
        (message,) = waiting(services)
        assert f"resp_{message['headers']['id']}" == late["id"]


@pytest.mark.parametrize("delete", [False, True])
def test_a_response_that_is_cancelled_or_deleted_before_its_push_is_never_queued(
    services: Services, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch, delete: bool
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(BackgroundResponses, "push", lambda *_, **__: "")
        made = create(services)
    (calls.delete if delete else calls.cancel)(services, CALLER, made["id"])
    assert look_now(services) == 1
    assert waiting(services) == []
    assert reserved(services) == {}
    assert redis_client.zcard("warmq:gateway:due:response") == 0
    assert redis_client.exists(response_key(made["id"])) == (not delete)


def test_a_cancelled_response_is_revoked_for_as_long_as_it_may_wait(
    services: Services, redis_client: redis.Redis
) -> None:
    made = create(services)
    assert reserved(services)["m"] > 10
    assert calls.cancel(services, CALLER, made["id"])["status"] == "cancelled"
    assert reserved(services) == {}
    until_s = redis_client.zscore(keys.REVOKED, request_id_of(made["id"]))
    assert until_s == pytest.approx(services.clock.now() + WINDOW_S + GRACE_S, abs=5)
    assert 0 < redis_client.ttl(response_key(made["id"])) <= RESULT_TTL_S
    assert calls.cancel(services, CALLER, made["id"])["status"] == "cancelled"
    end(services, made["id"])  # a worker had almost answered it
    assert calls.retrieve(services, CALLER, made["id"])["status"] == "cancelled"


def test_an_ended_response_is_not_cancelled(services: Services) -> None:
    made = create(services)
    end(services, made["id"])
    assert calls.cancel(services, CALLER, made["id"])["status"] == "failed"


@pytest.mark.parametrize("by_look", [False, True])
def test_a_response_goes_just_before_its_result_and_gives_its_tokens_back(
    services: Services, redis_client: redis.Redis, by_look: bool
) -> None:
    made = create(services)
    end(services, made["id"])
    if by_look:
        assert look_now(services) == 1
    else:
        assert calls.retrieve(services, CALLER, made["id"])["status"] == "failed"
    left = redis_client.pttl(response_key(made["id"]))
    assert 0 < left <= redis_client.pttl(keys.result_key(request_id_of(made["id"]))) - 900
    assert reserved(services) == {}
    redis_client.delete(response_key(made["id"]))  # as Redis does then
    look_now(services)
    forget_records(services)
    assert services.records.owners() == {}
    assert redis_client.zcard("warmq:gateway:due:response") == 0


def test_a_response_without_a_result_long_after_its_deadline_has_failed_and_goes(
    services: Services, redis_client: redis.Redis
) -> None:
    made = create(services)
    left_s = redis_client.ttl(response_key(made["id"]))
    assert left_s == pytest.approx(WINDOW_S + GRACE_S + RESULT_TTL_S, abs=5)
    stored = services.responses.get(made["id"])
    assert stored is not None
    record = decode(stored.document)
    record.deadline = services.clock.now() - GRACE_S - 1
    redis_client.hset(response_key(made["id"]), "document", encode(record))
    found = calls.retrieve(services, CALLER, made["id"])
    assert (found["status"], found["error"]["type"]) == ("failed", "expired")
    assert look_now(services) == 1
    assert reserved(services) == {}


def test_tokens_are_reserved_by_model_within_the_tenants_budget(
    services: Services, redis_client: redis.Redis
) -> None:
    caller = Caller(tenant="t", key_id="k", enqueued_tokens=80)
    made = create(services, caller)
    with pytest.raises(ApiError) as caught:
        create(services, caller)
        create(services, caller)
        create(services, caller)
    assert (caught.value.status, caught.value.code) == (429, "insufficient_quota")
    end(services, made["id"])
    age_reservations(redis_client)
    assert services.limits._budgets.give_back_of_ended("t") == 1


def age_reservations(client: redis.Redis) -> None:
    key = "warmq:gateway:reserved:t"
    for name, raw in client.hgetall(key).items():
        client.hset(key, name, orjson.dumps(orjson.loads(raw) | {"at": 1}))


def test_every_try_with_one_key_is_one_response(services: Services) -> None:
    first = create(services, key="k1")
    assert create(services, key="k1")["id"] == first["id"]
    assert create(services, key="k2")["id"] != first["id"]
    assert len(waiting(services)) == 2


def test_a_record_whose_reply_was_lost_is_written_again_and_queued(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = BackgroundResponses.create

    def twice(*args: Any, **options: Any) -> bool:
        assert write(*args, **options)
        return write(*args, **options)  # as redis-py does after a lost connection

    monkeypatch.setattr(BackgroundResponses, "create", twice)
    assert create(services)["status"] == "queued"
    assert len(waiting(services)) == 1


def test_another_tenant_finds_nothing(services: Services) -> None:
    made, other = create(services), Caller(tenant="other")
    for call in (calls.retrieve, calls.cancel, calls.delete):
        with pytest.raises(ApiError) as caught:
            call(services, other, made["id"])
        assert (caught.value.status, caught.value.code) == (404, "response_not_found")
    with pytest.raises(ApiError):
        calls.items(services, other, made["id"], after="", limit=1, oldest_first=True)
    assert calls.retrieve(services, CALLER, made["id"])["status"] == "queued"


def test_a_leased_request_is_in_progress_until_it_returns_or_ends(
    services: Services, worker: Lessee
) -> None:
    made = create(services)

    def status() -> str:
        services.responses._running_at = float("-inf")  # nothing is cached
        return str(calls.retrieve(services, CALLER, made["id"])["status"])

    (lease,) = worker.pop()
    assert status() == "in_progress"
    worker.release(lease)
    assert status() == "queued"
    (lease,) = worker.pop()
    assert worker.done(lease) == 1
    assert status() == "completed"


def test_a_cancelled_response_that_waits_is_never_leased(
    services: Services, worker: Lessee
) -> None:
    made = create(services)
    calls.cancel(services, CALLER, made["id"])
    assert worker.pop() == []
    assert waiting(services) == []
    assert calls.retrieve(services, CALLER, made["id"])["status"] == "cancelled"


def test_an_operator_lists_responses_and_deletes_ended_ones(
    services: Services, redis_client: redis.Redis
) -> None:
    made = create(services, instructions="x" * 5000)
    (record,) = tenant_records(services.batches, "t")
    assert (record.id, record.kind) == (made["id"], "response")
    assert record.bytes > 10_000  # the instructions are in the document and in the body
    with pytest.raises(BatchConflict):
        delete_record(services.batches, made["id"])
    end(services, made["id"])
    assert delete_record(services.batches, made["id"]) == "response"
    assert delete_record(services.batches, made["id"]) is None
    assert not redis_client.exists(keys.result_key(request_id_of(made["id"])))
    assert services.records.owners() == {}
    look_now(services)
    assert reserved(services) == {}
