"""Budgets of tenants, as the SDK meets them: tokens of unfinished batches, bytes of files."""

from __future__ import annotations

import openai
import orjson
import pytest
import redis
from kit.gateways.gateway_process import GatewayProcess

from contract.redis.batches import BatchStore
from demo.stack import eventually
from gateway.http.limits import estimated_tokens
from gateway.redis.api_keys import ApiKeys
from gateway.redis.limits import Budgets

LINE = orjson.dumps({
    "custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
    "body": {"model": "none", "messages": [{"role": "user", "content": "Hello"}]},
}) + b"\n"  # fmt: skip
TOKENS = estimated_tokens(len(LINE))


def client_for(gateway: GatewayProcess, store: BatchStore, **limits: int) -> openai.OpenAI:
    secret, _ = ApiKeys.using(store).create("t", **limits)
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=secret, max_retries=2)


def upload(client: openai.OpenAI, content: bytes = LINE) -> openai.types.FileObject:
    return client.files.create(file=("in.jsonl", content), purpose="batch")


def create(client: openai.OpenAI, file_id: str, **headers: str) -> openai.types.Batch:
    return client.batches.create(
        input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h",
        extra_headers=headers,
    )  # fmt: skip


def test_parts_of_an_upload_count_however_few_bytes_it_has_announced(
    gateway: GatewayProcess, store: BatchStore
) -> None:
    client = client_for(gateway, store, file_bytes=2000)
    begun = client.uploads.create(bytes=1, filename="x", mime_type="text/plain", purpose="batch")
    client.uploads.parts.create(begun.id, data=b"x" * 1500)
    assert Budgets.using(store).stored_bytes("t") == 1500
    with pytest.raises(openai.RateLimitError, match="500 of 2000 are left"):
        upload(client, b"x" * 600)
    with pytest.raises(openai.RateLimitError):
        client.uploads.parts.create(begun.id, data=b"x" * 600)
    with pytest.raises(openai.BadRequestError):  # they do not make up one byte; it stays open
        client.uploads.complete(begun.id, part_ids=[])
    assert Budgets.using(store).stored_bytes("t") >= 1500
    client.uploads.cancel(begun.id)
    assert Budgets.using(store).stored_bytes("t") == 0


def test_a_failed_complete_leaves_the_parts_counted(
    gateway: GatewayProcess, store: BatchStore
) -> None:
    client = client_for(gateway, store, file_bytes=2000)
    begun = client.uploads.create(bytes=1500, filename="x", mime_type="text/plain", purpose="batch")
    part = client.uploads.parts.create(begun.id, data=b"x" * 1500)
    with pytest.raises(openai.BadRequestError, match="MD5"):
        client.uploads.complete(begun.id, part_ids=[part.id], md5="0" * 32)
    assert Budgets.using(store).stored_bytes("t") == 1500
    assert client.uploads.complete(begun.id, part_ids=[part.id]).file is not None
    assert Budgets.using(store).stored_bytes("t") == 1500


def test_a_batch_holds_its_tokens_and_another_is_refused(
    gateway: GatewayProcess, store: BatchStore
) -> None:
    client = client_for(gateway, store, enqueued_tokens=TOKENS)
    file = upload(client)
    batch = create(client, file.id, **{"Idempotency-Key": "b"})
    assert create(client, file.id, **{"Idempotency-Key": "b"}).id == batch.id
    assert sum(Budgets.using(store).enqueued("t").values()) == TOKENS
    with pytest.raises(openai.RateLimitError) as raised:
        create(client, file.id)
    assert raised.value.code == "insufficient_quota"
    assert raised.value.response.headers["x-should-retry"] == "false"
    assert f"0 of {TOKENS} are left" in raised.value.message
    assert [each.id for each in client.batches.list()] == [batch.id]  # nothing was made


def test_what_an_unfinished_create_held_comes_back(
    gateway: GatewayProcess, store: BatchStore
) -> None:
    budgets = Budgets.using(store)
    client = client_for(gateway, store, enqueued_tokens=TOKENS)
    file = upload(client)
    budgets.reserve("t", "batch_never", {"": TOKENS}, None)
    raw = orjson.dumps({"at": 0, "models": {"": TOKENS}})
    store._client.hset("warmq:gateway:reserved:t", "batch_never", raw)  # long ago
    assert create(client, file.id).id


def test_files_hold_their_bytes_until_they_are_deleted(
    gateway: GatewayProcess, store: BatchStore
) -> None:
    client = client_for(gateway, store, file_bytes=2000)
    file = upload(client, b"x" * 1500)
    assert Budgets.using(store).stored_bytes("t") == 1500
    with pytest.raises(openai.RateLimitError) as raised:
        upload(client, b"x" * 600)
    assert raised.value.code == "insufficient_quota"
    assert "500 of 2000 are left" in raised.value.message
    assert [each.id for each in client.files.list()] == [file.id]
    client.files.delete(file.id)
    assert Budgets.using(store).stored_bytes("t") == 0
    assert upload(client, b"x" * 600)


def test_a_file_that_just_fits_is_taken(gateway: GatewayProcess, store: BatchStore) -> None:
    """What its form has beside it does not count."""
    client = client_for(gateway, store, file_bytes=2000)
    assert upload(client, b"x" * 2000).bytes == 2000
    with pytest.raises(openai.RateLimitError):
        upload(client, b"x")


def test_a_deleted_file_holds_its_bytes_while_a_batch_reads_it(
    gateway: GatewayProcess, store: BatchStore, redis_client: redis.Redis
) -> None:
    client = client_for(gateway, store, file_bytes=2000)
    file = upload(client)
    create(client, file.id)  # nobody serves its model, so its lines are not queued
    client.files.delete(file.id)
    assert Budgets.using(store).stored_bytes("t") == len(LINE)
    client.batches.cancel(client.batches.list().data[0].id)

    def swept() -> bool:
        redis_client.zadd("warmq:gateway:due:file", {file.id: 0})  # as some minutes later
        return Budgets.using(store).stored_bytes("t") == 0

    eventually(swept, 30, "its content is swept, and counts no more", every_s=0.5)
