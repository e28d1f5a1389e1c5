"""Anthropic's Message Batches over HTTP, asked by the unchanged anthropic SDK.

But for the last test, batches are ended by writing what a batch runner writes, so that all kinds
of endings are seen.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import orjson
import pytest
from kit.gateways.gateway_process import GatewayProcess
from kit.stacks.celery_side import simulated
from pydantic import SecretStr

from demo.stack import RedisServer, eventually
from gateway.batches.api.record import Status, decode, encode
from gateway.files.files import FileRecord, Files
from gateway.http.services import Services
from gateway.redis.api_keys import ApiKeys
from gateway.settings import GatewaySettings

MESSAGE = {
    "id": "msg_1", "type": "message", "role": "assistant", "model": "small", "stop_reason":
    "end_turn", "stop_sequence": None, "content": [{"type": "text", "text": "Hello there"}],
    "usage": {"input_tokens": 3, "output_tokens": 2},
}  # fmt: skip
REFUSED = {
    "status_code": 400, "request_id": "r2", "body": {"error": {
        "message": "too long", "type": "invalid_request_error", "param": None,
        "code": "context_length_exceeded"}},
}  # fmt: skip


def requests(count: int, **params: Any) -> Any:
    """Return requests named r0, r1, ..."""
    asked = {"model": "small", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi ☃"}]}
    return [{"custom_id": f"r{n}", "params": asked | params} for n in range(count)]


class Stack:
    """A Redis, a gateway and the SDK's clients; nobody runs batches of other tests' kinds."""

    def __init__(self, folder: Path) -> None:
        self.redis = RedisServer(folder / "redis").start()
        self.folder = folder
        # A model that may come later: without a worker, batches stay in progress.
        self.gateway = GatewayProcess(
            self.redis.url, folder, max_line_bytes=200_000, gateway_models="small"
        ).start()
        settings = GatewaySettings(
            redis_url=SecretStr(self.redis.url), gateway_store=str(folder / "files")
        )
        self.services = Services.open(settings)
        ApiKeys.using(self.services.batches).create("other")
        self.key = ApiKeys.using(self.services.batches).create("default")[0]
        self.foreign = ApiKeys.using(self.services.batches).create("foreign")[0]
        self.client = self.sdk(self.key)

    def sdk(self, key: str) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.gateway.url, api_key=key, max_retries=0)

    def close(self) -> None:
        self.client.close()
        self.services.close()
        self.gateway.kill()
        self.redis.stop()

    def input_of(self, batch_id: str) -> list[Any]:
        """Return the lines of the input file that was made of a batch's requests."""
        stored = self.services.objects.get("batch", "default", batch_id)
        assert stored is not None
        content = b"".join(self.services.store.read(decode(stored.document).input_file_id))
        return [orjson.loads(line) for line in content.splitlines()]

    def file(self, lines: list[Any]) -> str:
        """Write an output or error file, as a batch runner does."""
        file_id = f"file-{time.time_ns():024x}"
        with self.services.store.write(file_id) as writer:
            writer.write(b"".join(orjson.dumps(line) + b"\n" for line in lines))
            writer.commit()
        Files(self.services).create(FileRecord(
            id=file_id, tenant="default", bytes=1, created_at=1, filename="x",
            purpose="batch_output",
        ))  # fmt: skip
        return file_id

    def end(self, batch_id: str, status: Status, done: list[Any], failed: list[Any]) -> None:
        """Write a batch's end, as a batch runner does; a real one may be writing it, too."""
        while True:
            stored = self.services.objects.get("batch", "default", batch_id)
            assert stored is not None
            record = decode(stored.document)
            record.status, record.changed_at[status] = status, int(time.time())
            record.counts.completed, record.counts.failed = len(done), len(failed)
            record.output_file_id = self.file(done) if done else None
            record.error_file_id = self.file(failed) if failed else None
            if self.services.objects.replace(
                "batch", "default", stored, encode(record), record.created_at
            ):
                return


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    found = Stack(tmp_path_factory.mktemp("stack"))
    yield found
    found.close()


def success(name: str) -> Any:
    answer = {"status_code": 200, "request_id": "x", "body": MESSAGE}
    return {"id": "batch_req_1", "custom_id": name, "response": answer, "error": None}


def failure(name: str, code: str | None = None) -> Any:
    error = {"code": code, "message": "no"} if code else None
    answer = None if code else REFUSED
    return {"id": "batch_req_2", "custom_id": name, "response": answer, "error": error}


def test_a_new_batch_is_in_progress_and_all_its_requests_are_processing(stack: Stack) -> None:
    batch = stack.client.messages.batches.create(requests=requests(3, stream=False))
    assert re.fullmatch(r"msgbatch_[0-9a-f]{24}", batch.id) and batch.type == "message_batch"
    assert batch.processing_status == "in_progress"
    assert batch.request_counts.model_dump() == {
        "processing": 3, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0
    }  # fmt: skip
    assert (batch.expires_at - batch.created_at).total_seconds() == 86400
    assert batch.ended_at is None and batch.results_url is None and batch.archived_at is None
    assert str(batch._request_id).startswith("req_")
    again = stack.client.messages.batches.retrieve(batch.id)
    assert (again.id, again.created_at) == (batch.id, batch.created_at)
    with pytest.raises(anthropic.AnthropicError, match="results_url"):
        stack.client.messages.batches.results(batch.id)
    lines = stack.input_of(batch.id)
    assert [line["custom_id"] for line in lines] == ["r0", "r1", "r2"]
    assert {line["url"] for line in lines} == {"/v1/messages"}
    assert lines[0]["body"] == requests(1)[0]["params"]


def test_results_have_all_four_kinds_of_ending(stack: Stack) -> None:
    batch = stack.client.messages.batches.create(requests=requests(5))
    failed = [failure("r1"), failure("r2", "batch_expired"), failure("r3", "batch_cancelled"),
              failure("r4", "request_failed")]  # fmt: skip
    stack.end(batch.id, "expired", [success("r0")], failed)
    ended = stack.client.messages.batches.retrieve(batch.id)
    assert ended.processing_status == "ended" and ended.ended_at is not None
    counts = {"processing": 0, "succeeded": 1, "errored": 2, "canceled": 1, "expired": 1}
    assert ended.request_counts.model_dump() == counts
    found = {
        line.custom_id: line.result for line in stack.client.messages.batches.results(batch.id)
    }
    assert found["r0"].type == "succeeded"
    assert found["r0"].message.content[0].text == "Hello there"  # type: ignore[union-attr]
    assert found["r1"].type == "errored"
    assert found["r1"].error.error.type == "invalid_request_error"
    assert found["r1"].error.error.message == "too long"
    assert found["r4"].type == "errored" and found["r4"].error.error.type == "api_error"
    assert (found["r2"].type, found["r3"].type) == ("expired", "canceled")


async def test_the_asynchronous_client_does_the_same(stack: Stack) -> None:
    async with anthropic.AsyncAnthropic(base_url=stack.gateway.url, api_key=stack.key) as client:
        batch = await client.messages.batches.create(requests=requests(2))
        stack.end(batch.id, "completed", [success("r0"), success("r1")], [])
        results = [line async for line in await client.messages.batches.results(batch.id)]
        assert [line.custom_id for line in results] == ["r0", "r1"]
        listed = [b.id async for b in client.messages.batches.list(limit=1)]
        assert batch.id in listed and len(listed) == len(set(listed)) >= 2


def test_a_batch_that_was_refused_as_a_whole_has_an_error_for_each_request(stack: Stack) -> None:
    batch = stack.client.messages.batches.create(requests=requests(2))
    stack.end(batch.id, "failed", [], [])
    assert stack.client.messages.batches.retrieve(batch.id).request_counts.errored == 2
    results = list(stack.client.messages.batches.results(batch.id))
    assert [(r.custom_id, r.result.type) for r in results] == [("r0", "errored"), ("r1", "errored")]


def test_pages_go_both_ways_and_show_only_the_callers_own(stack: Stack) -> None:
    sdk = stack.sdk(ApiKeys.using(stack.services.batches).create("pages")[0])
    made = [sdk.messages.batches.create(requests=requests(1)).id for _ in range(23)]
    newest_first = [batch.id for batch in sdk.messages.batches.list(limit=5)]
    assert sorted(newest_first) == sorted(made)
    page = sdk.messages.batches.list(after_id=newest_first[9], limit=5)
    assert [b.id for b in page.data] == newest_first[10:15] and page.has_more
    assert (page.first_id, page.last_id) == (newest_first[10], newest_first[14])
    before = sdk.messages.batches.list(before_id=newest_first[12], limit=5)
    assert [b.id for b in before.data] == newest_first[7:12]
    backwards = [b.id for b in sdk.messages.batches.list(before_id=newest_first[12], limit=5)]
    assert sorted(backwards) == sorted(newest_first[:12])
    with pytest.raises(anthropic.NotFoundError):
        stack.sdk(stack.foreign).messages.batches.list(after_id=made[0])
    assert stack.sdk(stack.foreign).messages.batches.list().data == []


def test_a_batch_is_cancelled_and_deleted_once_it_has_ended(stack: Stack) -> None:
    batches = stack.client.messages.batches
    batch = batches.create(requests=requests(2))
    with pytest.raises(anthropic.BadRequestError, match="in progress"):
        batches.delete(batch.id)
    cancelled = batches.cancel(batch.id)
    assert cancelled.processing_status in ("canceling", "ended")
    assert cancelled.cancel_initiated_at is not None
    failed = [failure(f"r{n}", "batch_cancelled") for n in range(2)]
    stack.end(batch.id, "cancelled", [], failed)
    assert batches.cancel(batch.id).request_counts.canceled == 2
    deleted = batches.delete(batch.id)
    assert (deleted.id, deleted.type) == (batch.id, "message_batch_deleted")
    with pytest.raises(anthropic.NotFoundError):
        batches.retrieve(batch.id)
    assert batch.id not in [b.id for b in batches.list(limit=100)]


def test_openais_route_neither_shows_nor_cancels_a_message_batch(stack: Stack) -> None:
    batch = stack.client.messages.batches.create(requests=requests(1))
    url, headers = f"{stack.gateway.url}/v1/batches/{batch.id}", {"x-api-key": stack.key}
    assert httpx.get(url, headers=headers).status_code == 404
    assert httpx.post(f"{url}/cancel", headers=headers).status_code == 404
    found = stack.client.messages.batches.retrieve(batch.id)
    assert found.cancel_initiated_at is None


def test_a_batch_over_the_budget_is_refused_when_it_is_made_and_leaves_nothing(
    stack: Stack,
) -> None:
    secret, _ = ApiKeys.using(stack.services.batches).create("poor", enqueued_tokens=1)
    poor = stack.sdk(secret)
    with pytest.raises(anthropic.RateLimitError, match="Enqueued token limit"):
        poor.messages.batches.create(requests=requests(2))
    assert poor.messages.batches.list().data == []
    assert Files(stack.services).page("poor", "", 10, oldest_first=False, purpose=None) == (
        [],
        False,
    )


def test_no_foreign_batch_is_seen_cancelled_deleted_or_read(stack: Stack) -> None:
    batch = stack.client.messages.batches.create(requests=requests(1))
    stack.end(batch.id, "completed", [success("r0")], [])
    foreign = stack.sdk(stack.foreign).messages.batches
    for ask in (foreign.retrieve, foreign.cancel, foreign.delete, foreign.results):
        with pytest.raises(anthropic.NotFoundError):
            ask(batch.id)
    answer = httpx.get(
        f"{stack.gateway.url}/v1/messages/batches/{batch.id}/results",
        headers={"x-api-key": stack.foreign},
    )
    assert answer.status_code == 404


def post(stack: Stack, content: bytes, **headers: str) -> httpx.Response:
    return httpx.post(
        f"{stack.gateway.url}/v1/messages/batches", content=content, timeout=60,
        headers={"authorization": f"Bearer {stack.key}"} | headers,
    )  # fmt: skip


ONE = requests(1)[0]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"", "JSON"), (b"{", "JSON"), (b"[]", "requests"), (b"{}", "requests"), (b"\xff", "JSON"),
        ({"requests": []}, "requests"), ({"requests": 3}, "requests"), ({"requests": [1]}, "0"),
        ({"requests": [ONE, ONE]}, "custom_id: r0 was used"),
        ({"requests": [{"custom_id": "a b", "params": ONE["params"]}]}, "0.custom_id"),
        ({"requests": [{"custom_id": "a"}]}, "0.params"),
        ({"requests": requests(1, max_tokens=0)}, "0.params.max_tokens"),
        ({"requests": requests(1, max_tokens=True)}, "0.params.max_tokens"),
        ({"requests": requests(1, stream=True)}, "0.params.stream"),
        ({"requests": requests(1, messages=[])}, "0.params.messages"),
        ({"requests": requests(1, model=7)}, "0.params.model"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_in_anthropics_envelope(stack: Stack, body: Any, named: str) -> None:
    answer = post(stack, body if isinstance(body, bytes) else orjson.dumps(body))
    told = answer.json()
    assert answer.status_code == 400 and told["type"] == "error"
    assert told["error"]["type"] == "invalid_request_error" and named in told["error"]["message"]
    assert told["request_id"] == answer.headers["request-id"]


def test_what_is_too_large_is_413(stack: Stack) -> None:
    long = [{"role": "user", "content": "x" * 300_000}]
    answer = post(stack, orjson.dumps({"requests": requests(1, messages=long)}))
    assert answer.status_code == 413 and answer.json()["error"]["type"] == "request_too_large"
    answer = post(stack, b'{"requests": [{"custom_id": "' + b"x" * 5_000_000)
    assert answer.status_code == 413


def test_nothing_of_a_refused_create_stays_in_the_store(stack: Stack, tmp_path: Path) -> None:
    folder = Path(stack.services.settings.gateway_store)
    before = sorted(folder.iterdir())
    assert post(stack, orjson.dumps({"requests": [*requests(50), ONE]})).status_code == 400
    assert sorted(folder.iterdir()) == before


def test_the_same_idempotency_key_makes_one_batch(stack: Stack) -> None:
    body = orjson.dumps({"requests": requests(2)})
    first, again = (post(stack, body, **{"idempotency-key": "k1"}) for _ in range(2))
    assert first.json()["id"] == again.json()["id"]
    other = post(stack, orjson.dumps({"requests": requests(3)}), **{"idempotency-key": "k1"})
    assert other.status_code == 409 and other.headers["x-should-retry"] == "false"
    assert other.json()["error"]["type"] == "conflict_error"


def test_a_large_create_takes_little_memory(stack: Stack) -> None:
    content = [{"role": "user", "content": "word " * 400}]
    rows = (orjson.dumps(row) for row in requests(50_000, messages=content))
    body = b'{"requests": [' + b",".join(rows) + b"]}"
    assert len(body) > 100_000_000
    assert stack.gateway.process is not None
    answer = post(stack, body)
    assert answer.json()["request_counts"]["processing"] == 50_000
    status = Path(f"/proc/{stack.gateway.process.pid}/status").read_text()
    peak_kb = int(re.search(r"VmHWM:\s+(\d+)", status)[1])  # type: ignore[index]
    assert peak_kb < 200_000


@pytest.mark.parametrize(
    ("query", "status"),
    [("limit=0", 400), ("limit=1001", 400), ("limit=x", 400), ("after_id=msgbatch_none", 404),
     ("before_id=x", 404), ("after_id=a&before_id=b", 400), ("limit=1000", 200)],
)  # fmt: skip
def test_lists_refuse_what_no_page_can_be(stack: Stack, query: str, status: int) -> None:
    answer = httpx.get(
        f"{stack.gateway.url}/v1/messages/batches?{query}", headers={"x-api-key": stack.key}
    )
    assert answer.status_code == status
    assert status == 200 or answer.json()["type"] == "error"


def test_a_worker_answers_a_batch_and_its_bad_requests_are_told(stack: Stack) -> None:
    asked = [*requests(20), {"custom_id": "bad", "params": requests(1, top_p=7)[0]["params"]}]
    batches = stack.client.messages.batches
    batch = batches.create(requests=asked)
    worker = simulated(stack.redis.url, stack.folder / "worker.log", served_model_name="small")
    try:
        worker.start()
        eventually(lambda: batches.retrieve(batch.id).processing_status == "ended", 60, every_s=0.1)
    finally:
        worker.kill()
    counts = batches.retrieve(batch.id).request_counts
    assert (counts.succeeded, counts.errored, counts.processing) == (20, 1, 0)
    found = {line.custom_id: line.result for line in batches.results(batch.id)}
    assert found.keys() == {line["custom_id"] for line in asked}
    first = found["r0"]
    assert first.type == "succeeded" and first.message.role == "assistant"
    assert first.message.content[0].type == "text" and first.message.usage.output_tokens
    bad = found["bad"]
    assert bad.type == "errored" and bad.error.error.type == "invalid_request_error"
    assert "top_p" in bad.error.error.message
