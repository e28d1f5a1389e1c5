"""What a tenant keeps in Redis has an end, a bound, and a rate; one clock counts its time."""

from __future__ import annotations

import http.client
import time

import httpx
import openai
import orjson
import pytest
import redis
from kit.commands.support import run_producer
from kit.gateways.gateway_process import GatewayProcess

from contract.redis.batches import BatchStore
from contract.redis.records import MOST_PART, Records
from demo.stack import RedisServer, eventually
from gateway.batches.api.record import KEPT_S
from gateway.http.limits import REFUSED_PER_MINUTE, WRITES_PER_MINUTE
from gateway.redis.api_keys import ApiKeys
from gateway.redis.limits import Budgets

LINE = orjson.dumps({
    "custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
    "body": {"model": "none", "messages": [{"role": "user", "content": "Hello"}]},
}) + b"\n"  # fmt: skip
MOST_FILE = 100_000
#: Of the fixture `gateway`.
GATEWAY_SETTINGS = {"gateway_max_file_bytes": MOST_FILE}
METADATA = {f"k{n}": "🦊" * 512 for n in range(16)}


def client_for(
    gateway: GatewayProcess, store: BatchStore, tenant: str = "t", **limits: int
) -> openai.OpenAI:
    secret, _ = ApiKeys.using(store).create(tenant, **limits)
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=secret, max_retries=0)


def upload(client: openai.OpenAI, content: bytes = LINE) -> openai.types.FileObject:
    return client.files.create(file=("in.jsonl", content), purpose="batch")


def create(client: openai.OpenAI, file_id: str, **fields: object) -> openai.types.Batch:
    return client.batches.create(
        input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h", **fields
    )  # type: ignore[call-overload, no-any-return]


def cancelled(client: openai.OpenAI, **fields: object) -> openai.types.Batch:
    """Return a batch that has ended."""
    batch = create(client, upload(client).id, **fields)
    client.batches.cancel(batch.id)
    eventually(lambda: client.batches.retrieve(batch.id).status == "cancelled", 30)
    return client.batches.retrieve(batch.id)


def test_the_record_of_an_ended_batch_has_an_end(
    gateway: GatewayProcess, store: BatchStore, redis_client: redis.Redis
) -> None:
    batch = cancelled(client_for(gateway, store))
    left = redis_client.ttl(f"warmq:gateway:batch:{batch.id}")
    assert KEPT_S - 60 < left <= KEPT_S


def test_records_count_with_their_metadata_until_they_have_gone(
    gateway: GatewayProcess, store: BatchStore, redis_client: redis.Redis
) -> None:
    client, records = client_for(gateway, store), Records.using(store)
    file = upload(client, b"")
    assert 1000 < records.bytes_of("t") < 2000  # also an empty file's
    batch = create(client, file.id, metadata=METADATA)
    assert records.bytes_of("t") > 16 * 512 * 4
    redis_client.delete(f"warmq:gateway:batch:{batch.id}")  # as Redis does at its end
    assert records.forget_gone("t") == 1
    client.files.delete(file.id)
    assert records.owners() == {}
    assert not redis_client.exists("warmq:gateway:records:t", "warmq:gateway:batchs:t")


def test_a_tenant_cannot_fill_redis_with_records_and_others_go_on(
    redis_client: redis.Redis, redis_server: RedisServer, store: BatchStore,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    most = 2 * 2**20
    redis_client.config_set("maxmemory", redis_client.info("memory")["used_memory"] + 32 * 2**20)
    try:
        limit = Records.using(store).most_bytes()
        assert limit >= most
        with GatewayProcess(redis_server.url, tmp_path_factory.mktemp("small")) as gateway:
            client = client_for(gateway, store)
            file = upload(client)
            with pytest.raises(openai.RateLimitError) as raised:
                for _ in range(limit // 30_000 + 50):
                    create(client, file.id, metadata=METADATA)
            told = raised.value
            assert told.code == "insufficient_quota"
            assert str(limit) in told.message
            assert "delete files" in told.message
            assert told.response.headers["x-should-retry"] == "false"
            with pytest.raises(openai.RateLimitError, match="Record limit"):
                upload(client, b"")
            with pytest.raises(openai.RateLimitError, match="Record limit"):
                client.uploads.create(
                    bytes=1, filename="x", mime_type="text/plain", purpose="batch"
                )
            other = client_for(gateway, store, "other")
            assert create(other, upload(other).id).id
            assert redis_client.info("memory")["maxmemory"] // MOST_PART == limit
    finally:
        redis_client.config_set("maxmemory", 0)


def test_what_a_tenant_keeps_is_listed_and_removed_by_a_command(
    gateway: GatewayProcess, store: BatchStore, redis_server: RedisServer
) -> None:
    client = client_for(gateway, store)
    batch, running = cancelled(client), create(client, upload(client).id)
    listed = run_producer("records", "--json", redis_url=redis_server.url)
    assert {row["tenant"]: row["kinds"] for row in orjson.loads(listed.stdout)} == {
        "t": {"batch": 2, "file": 2}
    }
    listed = run_producer("records", "-t", "t", "--json", redis_url=redis_server.url)
    rows = orjson.loads(listed.stdout)
    assert {row["id"] for row in rows} >= {batch.id, running.id, batch.input_file_id}
    done = run_producer("delete", batch.id, redis_url=redis_server.url)
    assert done.returncode == 0, done.stderr
    assert [each.id for each in client.batches.list()] == [running.id]
    refused = run_producer("delete", running.id, redis_url=redis_server.url)
    assert refused.returncode == 2
    assert "validating" in refused.stderr
    done = run_producer("delete", batch.input_file_id, redis_url=redis_server.url)
    assert done.returncode == 0, done.stderr
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(batch.input_file_id)


def test_the_doctor_says_who_fills_redis_with_what(
    gateway: GatewayProcess, store: BatchStore, redis_server: RedisServer
) -> None:
    client = client_for(gateway, store, "research")
    create(client, upload(client).id, metadata=METADATA)
    printed = run_producer("doctor", "--json", redis_url=redis_server.url).stdout
    (finding,) = [each for each in orjson.loads(printed)["findings"] if each["code"] == "records"]
    assert finding["facts"]["tenant"] == "research"
    assert sorted(finding["facts"]["kinds"]) == ["1 batch", "1 file"]
    assert finding["facts"]["held_bytes"] > 30_000


def test_calls_that_write_have_a_rate_and_reads_have_none(
    gateway: GatewayProcess, store: BatchStore, redis_client: redis.Redis
) -> None:
    client = client_for(gateway, store)
    upload(client)
    (key,) = redis_client.keys("warmq:gateway:rate:*:writes")
    assert float(redis_client.hget(key, "requests")) == WRITES_PER_MINUTE - 1
    redis_client.hset(key, mapping={"requests": "-50", "at": int(time.time() * 1000)})
    with pytest.raises(openai.RateLimitError) as raised:
        upload(client)
    told = raised.value
    assert told.code == "rate_limit_exceeded"
    assert int(told.response.headers["retry-after"]) >= 1
    assert told.response.headers["x-ratelimit-limit-requests"] == str(WRITES_PER_MINUTE)
    client.files.list()
    eventually(lambda: bool(upload(client)) if _free(redis_client, key) else False, 10)


def _free(redis_client: redis.Redis, key: str) -> bool:
    """Whether a bucket has filled up again."""
    level, at = redis_client.hmget(key, "requests", "at")
    return level is None or float(level) + (time.time() - int(at) / 1000) * 100 > 2


def test_refusals_that_are_remembered_have_a_rate(
    gateway: GatewayProcess, store: BatchStore, redis_client: redis.Redis
) -> None:
    secret, _ = ApiKeys.using(store).create("t")
    statuses = []
    with httpx.Client(headers={"Authorization": f"Bearer {secret}"}) as client:
        for n in range(REFUSED_PER_MINUTE + 20):
            answer = client.post(
                f"{gateway.url}/v1/batches", json={"n": n}, headers={"Idempotency-Key": str(n)}
            )
            statuses.append(answer.status_code)
    assert set(statuses) == {400, 429}
    assert "retry-after" in answer.headers
    remembered = len(redis_client.keys("warmq:gateway:idempotent:*"))
    assert remembered < REFUSED_PER_MINUTE + 20


def test_refusals_that_store_nothing_have_no_rate(
    gateway: GatewayProcess, store: BatchStore
) -> None:
    secret, _ = ApiKeys.using(store).create("t")
    headers = {"Authorization": f"Bearer {secret}", "Idempotency-Key": "one"}
    with httpx.Client(headers=headers) as client:
        for n in range(REFUSED_PER_MINUTE + 20):  # the first one's answer, or a conflict with it
            answer = client.post(f"{gateway.url}/v1/batches", json={"n": n // 40})
            assert answer.status_code == (400 if n < 40 else 409)


@pytest.mark.parametrize("path", ["/v1/files", "/v1/uploads/{}/parts", "/v1/messages/batches"])
def test_a_form_that_is_too_large_is_refused_by_its_length(
    gateway: GatewayProcess, store: BatchStore, path: str
) -> None:
    client = client_for(gateway, store)
    begun = client.uploads.create(bytes=9, filename="x", mime_type="text/plain", purpose="batch")
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=10)
    connection.putrequest("POST", path.format(begun.id))
    connection.putheader("Authorization", f"Bearer {client.api_key}")
    connection.putheader("Content-Type", "multipart/form-data; boundary=b")
    connection.putheader("Content-Length", str(9 * 2**30))
    connection.endheaders()
    answer = connection.getresponse()  # nothing of the body was sent
    assert answer.status == 413
    assert answer.getheader("connection") == "close"
    assert str(9 * 2**30) in orjson.loads(answer.read())["error"]["message"]


def test_a_refused_file_is_told_with_the_size_of_its_request(
    gateway: GatewayProcess, store: BatchStore
) -> None:
    client = client_for(gateway, store, file_bytes=1000)
    with pytest.raises(openai.RateLimitError) as raised:
        upload(client, b"x" * 90_000)
    size = int(raised.value.message.split("body has ")[1].split()[0])
    assert 90_000 < size < 91_000


def test_output_files_count_and_are_kept_beyond_the_limit(
    gateway: GatewayProcess, store: BatchStore
) -> None:
    client = client_for(gateway, store, file_bytes=2 * len(LINE))
    batch = create(client, upload(client).id, extra_body={"completion_window": "1s"})
    eventually(lambda: client.batches.retrieve(batch.id).status == "expired", 30)
    error_file = client.batches.retrieve(batch.id).error_file_id
    assert error_file is not None
    size = client.files.retrieve(error_file).bytes
    assert size > len(LINE)
    assert Budgets.using(store).stored_bytes("t") == len(LINE) + size
    with pytest.raises(openai.RateLimitError, match="output files included"):
        create(client, batch.input_file_id)
    with pytest.raises(openai.RateLimitError, match="File storage limit"):
        upload(client)
    client.files.delete(error_file)
    assert Budgets.using(store).stored_bytes("t") == len(LINE)
    assert create(client, batch.input_file_id).id


@pytest.mark.parametrize("tells", ["Redis", "bytes", "maxmemory", "WARMQ"])
def test_a_full_queue_is_told_to_users_in_words_for_users(tells: str) -> None:
    from contract.errors import StoreFull
    from gateway.http.errors import api_error

    told = api_error(StoreFull("Redis uses 90 of 100 bytes (WARMQ_HIGH_WATER); raise maxmemory"))
    assert tells not in told.message
    assert (told.status, told.code) == (503, "queue_full")
