"""Batches over HTTP: a real gateway, Redis and simulated worker, asked by the openai SDK."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import orjson
import pytest
from kit.commands.support import chat_line, write_lines
from kit.gateways.batch_stack import BatchStack


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BatchStack]:
    """Return the stack, without a running worker."""
    found = BatchStack(tmp_path_factory.mktemp("stack"))
    yield found
    found.close()


# -- create ------------------------------------------------------------------------------------


def test_a_new_batch_is_validating_with_counts_of_zero(stack: BatchStack) -> None:
    batch = stack.create(metadata={"who": "me"}, completion_window="1h30m")
    assert batch.id.startswith("batch_")
    assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"who": "me"})
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (0, 0, 0)
    assert (batch.output_file_id, batch.error_file_id, batch.errors) == (None, None, None)
    assert (batch.completion_window, batch.expires_at - batch.created_at) == ("1h30m", 5400)
    assert batch.usage.total_tokens == 0
    assert stack.client.batches.retrieve(batch.id).id == batch.id


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/videos"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "0s"}, "completion_window"),
        ({"completion_window": "9" * 500 + "d"}, "completion_window"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: ""}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after"),
        ({"output_expires_after": {"anchor": "x", "seconds": 5000}}, "output_expires_after"),
        ({"extra_body": {"order": "random"}}, "order"),
        ({"extra_body": {"priority": 10}}, "priority"),
        ({"extra_body": {"once": "yes"}}, "once"),
        ({"input_file_id": None}, "input_file_id"),
    ],
)
def test_a_wrong_field_is_named(stack: BatchStack, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        stack.create(**fields)
    assert caught.value.type == "invalid_request_error"
    assert caught.value.param is not None
    assert caught.value.param.startswith(param)
    assert caught.value.code


def test_a_file_must_be_there_and_for_batches(stack: BatchStack) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        stack.create(input_file_id="file-unknown")
    assert caught.value.param == "input_file_id"
    with pytest.raises(openai.BadRequestError) as wrong:
        stack.create(input_file_id=stack.uploaded(purpose="vision"))
    assert wrong.value.param == "input_file_id"


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'"x"', b"\xff", b"null", b'{"a":1}'])
def test_a_body_that_is_no_create_is_a_400(stack: BatchStack, body: bytes) -> None:
    answer = httpx.post(f"{stack.gateway.url}/v1/batches", content=body)
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


# -- list --------------------------------------------------------------------------------------


def test_the_sdk_pages_over_250_batches_of_both_kinds(stack: BatchStack) -> None:
    before = {batch.id for batch in stack.client.batches.list(limit=100)}
    made = [stack.create().id for _ in range(200)]
    for n in range(50):
        stack.store.create(f"queued-{n}", "0" * 40, {"tenant": "default", "queue": "warmq"})
    found = [batch.id for batch in stack.client.batches.list(limit=7)]
    assert len(found) == len(set(found))
    assert set(found) - before == {*made, *(f"queued-{n}" for n in range(50))}
    by_time = [batch.created_at for batch in stack.client.batches.list()]
    assert by_time == sorted(by_time, reverse=True)


def test_a_page_has_what_was_asked_for(stack: BatchStack) -> None:
    for _ in range(3):
        stack.create()
    page = stack.client.batches.list(limit=2)
    assert len(page.data) == 2
    assert page.has_more
    raw = httpx.get(f"{stack.gateway.url}/v1/batches", params={"limit": 2}).json()
    assert raw["object"] == "list"
    assert (raw["first_id"], raw["last_id"]) == (raw["data"][0]["id"], raw["data"][1]["id"])


@pytest.mark.parametrize(
    ("limit", "code"),
    [
        ("101", "integer_above_max_value"), ("9" * 5000, "integer_above_max_value"),
        ("0", "integer_below_min_value"), ("-1", "integer_below_min_value"), ("x", "invalid_type"),
    ],
)  # fmt: skip
def test_a_limit_out_of_range_is_a_400(stack: BatchStack, limit: str, code: str) -> None:
    answer = httpx.get(f"{stack.gateway.url}/v1/batches", params={"limit": limit})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["param"], error["code"]) == (
        "invalid_request_error", "limit", code
    )  # fmt: skip


def test_an_unknown_batch_is_a_404(stack: BatchStack) -> None:
    for ask in (
        lambda: stack.client.batches.retrieve("batch_unknown"),
        lambda: stack.client.batches.cancel("batch_unknown"),
        lambda: stack.client.batches.list(after="batch_unknown"),
    ):
        with pytest.raises(openai.NotFoundError):
            ask()


# -- cancel --------------------------------------------------------------------------------------


def test_cancelling_is_answered_at_once_and_again(stack: BatchStack) -> None:
    batch = stack.create()
    first = stack.client.batches.cancel(batch.id)
    assert first.status in ("cancelling", "cancelled")
    assert stack.client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    assert first.cancelling_at is not None


# -- batches of `producer submit` ----------------------------------------------------------------


def test_a_submitted_batch_is_seen_cancelled_and_read(stack: BatchStack) -> None:
    stack.submit("sub-1", 5)
    batch = stack.client.batches.retrieve("sub-1")
    assert (batch.status, batch.request_counts.total) == ("in_progress", 5)
    assert batch.metadata["input"].endswith("sub-1.jsonl")
    assert "sub-1" in [found.id for found in stack.client.batches.list()]
    assert stack.client.batches.cancel("sub-1").status in ("cancelling", "cancelled")
    ended = stack.ended("sub-1")
    assert ended.status == "cancelled"
    assert (ended.request_counts.failed, ended.output_file_id) == (5, None)
    lines = [orjson.loads(x) for x in stack.client.files.content(ended.error_file_id).iter_lines()]
    assert [line["custom_id"] for line in lines] == [f"r{n}" for n in range(5)]
    assert {line["error"]["code"] for line in lines} == {"batch_cancelled"}


@pytest.fixture
def worker(stack: BatchStack) -> Iterator[None]:
    """A worker serves the queue during the test."""
    stack.worker.start()
    yield
    stack.worker.stop()


@pytest.mark.usefixtures("worker")
def test_the_output_of_a_submitted_batch_is_what_results_writes(stack: BatchStack) -> None:
    lines: list[Any] = [chat_line(f"r{n}", f"question {n}") for n in range(300)]
    lines[7] = chat_line("bad", "x", temperature=9)
    source = write_lines(stack.folder / "sub-2.jsonl", lines)
    stack.producer("submit", source, "--batch-id", "sub-2")
    ended = stack.ended("sub-2")
    assert ended.status == "completed"
    counts = ended.request_counts
    assert (counts.total, counts.completed, counts.failed) == (300, 299, 1)
    assert ended.usage.total_tokens == ended.usage.input_tokens + ended.usage.output_tokens > 0
    out = stack.folder / "sub-2.out"
    stack.producer("results", "sub-2", "-o", out)
    assert stack.client.files.content(ended.output_file_id).read() == out.read_bytes()
    (failed,) = stack.client.files.content(ended.error_file_id).iter_lines()
    assert orjson.loads(failed)["response"]["status_code"] == 400
    file = stack.client.files.retrieve(ended.output_file_id)
    assert (file.purpose, file.status) == ("batch_output", "processed")
    with pytest.raises(openai.BadRequestError):
        stack.client.files.delete(ended.output_file_id)


def test_partial_results_are_read_while_a_batch_runs(stack: BatchStack) -> None:
    stack.submit("sub-3", 150)
    headers = {"X-Partial-Results": "true"}
    assert stack.client.batches.retrieve("sub-3").output_file_id is None
    batch = stack.client.batches.retrieve("sub-3", extra_headers=headers)
    by_query = stack.client.batches.retrieve("sub-3", extra_query={"partial": "true"})
    assert batch.output_file_id == by_query.output_file_id != ""
    raw = stack.client.files.with_raw_response
    nothing = raw.content(batch.output_file_id)
    assert (nothing.headers["x-incomplete"], nothing.headers["x-last-line"]) == ("true", "0")
    assert nothing.http_response.content == b""
    found: list[dict[str, Any]] = []
    at, incomplete = 0, True
    stack.worker.start()
    try:
        while incomplete:
            part = raw.content(batch.output_file_id, extra_query={"offset": at})
            incomplete = part.headers["x-incomplete"] == "true"
            lines = [orjson.loads(line) for line in part.http_response.iter_lines()]
            assert len(lines) == int(part.headers["x-last-line"]) - at
            at += len(lines)
            found += lines
    finally:
        stack.worker.stop()
    assert sorted(line["custom_id"] for line in found) == sorted(f"r{n}" for n in range(150))
    final = stack.client.batches.retrieve("sub-3", extra_headers=headers)
    assert final.status == "completed"
    assert final.output_file_id != batch.output_file_id
    for wrong in ("x", "-1", "1" * 40):
        with pytest.raises(openai.BadRequestError):
            raw.content(batch.output_file_id, extra_query={"offset": wrong})


# -- keys ------------------------------------------------------------------------------------------


def test_a_create_that_comes_again_with_its_key_makes_one_batch(stack: BatchStack) -> None:
    headers = {"Idempotency-Key": "once-1"}
    first, again = (stack.create(extra_headers=headers) for _ in range(2))
    other = stack.create(extra_headers={"Idempotency-Key": "once-2"})
    assert first.id == again.id != other.id
    assert [b.id for b in stack.client.batches.list()].count(first.id) == 1
    with pytest.raises(openai.ConflictError) as caught:
        stack.create(extra_headers=headers, completion_window="48h")
    assert caught.value.response.headers["x-should-retry"] == "false"
