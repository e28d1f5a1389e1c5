"""Batches over HTTP from the file to the output, as the openai SDK goes through them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from kit.commands.support import chat_line, write_lines
from kit.gateways.batch_stack import BatchStack
from kit.stacks.celery_side import simulated

from demo.stack import eventually


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BatchStack]:
    """Return the stack; tests start workers of their own."""
    found = BatchStack(tmp_path_factory.mktemp("stack"), carries=True)
    yield found
    found.close()


def serving(stack: BatchStack, slots: int, latency_s: float) -> Iterator[None]:
    """Serve the queue."""
    log = stack.folder / "serving.log"
    worker = simulated(
        stack.redis.url, log, simulated_slots=slots, simulated_latency_s=latency_s, look_ahead=0
    )
    worker.start()
    yield
    worker.kill()


@pytest.fixture
def worker(stack: BatchStack) -> Iterator[None]:
    """A worker serves the queue during the test, 64 requests at a time."""
    yield from serving(stack, 64, 0.1)


@pytest.fixture
def slow_worker(stack: BatchStack) -> Iterator[None]:
    """A worker serves the queue during the test, one request at a time, each for 2 s."""
    yield from serving(stack, 1, 2)


def begun(stack: BatchStack, lines: list[Any], **fields: Any) -> Any:
    """Upload lines and create their batch."""
    path = write_lines(stack.folder / "in.jsonl", lines)
    with path.open("rb") as file:
        uploaded = stack.client.files.create(file=file, purpose="batch")
    return stack.client.batches.create(
        input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h",
        **fields,
    )  # fmt: skip


def in_queue(stack: BatchStack, batch_id: str) -> Any:
    """Return a batch as soon as its requests wait in the queue."""

    def look() -> Any:
        batch = stack.client.batches.retrieve(batch_id)
        return batch if batch.status == "in_progress" else None

    return eventually(look, 30, f"{batch_id} is in the queue")


def lines_of(stack: BatchStack, file_id: str) -> list[dict[str, Any]]:
    """Return the lines of a file."""
    content = stack.client.files.content(file_id)
    return [orjson.loads(line) for line in content.read().splitlines()]


@pytest.mark.usefixtures("worker")
def test_a_file_becomes_an_output_in_the_files_order(stack: BatchStack) -> None:
    lines: list[Any] = [chat_line(f"r{n}", f"question {n}") for n in range(120)]
    batch = stack.ended(begun(stack, lines, metadata={"mine": "1"}).id)
    assert (batch.status, batch.error_file_id, batch.errors) == ("completed", None, None)
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (120, 120, 0)
    assert batch.in_progress_at is not None
    assert batch.finalizing_at is not None
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    assert batch.usage.total_tokens == batch.usage.input_tokens + batch.usage.output_tokens > 0
    found = lines_of(stack, batch.output_file_id)
    assert [line["custom_id"] for line in found] == [f"r{n}" for n in range(120)]
    file = stack.client.files.retrieve(batch.output_file_id)
    assert (file.purpose, file.status) == ("batch_output", "processed")
    assert file.bytes == len(stack.client.files.content(file.id).read())
    assert batch.output_file_id in [listed.id for listed in stack.client.files.list()]


def comparable(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line without ids and times."""
    line = orjson.loads(orjson.dumps(line))
    line.pop("id")
    line.pop("warmq", None)
    if line["response"]:
        line["response"].pop("request_id")
        for name in ("id", "created"):
            line["response"]["body"].pop(name, None)
    return line


@pytest.mark.usefixtures("worker")
def test_the_same_file_by_producer_submit_gives_the_same_lines(stack: BatchStack) -> None:
    lines = [chat_line(f"r{n}", f"question {n}", seed=1) for n in range(50)]
    batch = stack.ended(begun(stack, lines).id)
    path = write_lines(stack.folder / "same.jsonl", lines)
    stack.producer("submit", path, "--batch-id", "same", "--wait", "-o", stack.folder / "same.out")
    theirs = [orjson.loads(line) for line in (stack.folder / "same.out").read_bytes().splitlines()]
    ours = lines_of(stack, batch.output_file_id)
    assert list(map(comparable, ours)) == list(map(comparable, theirs))


@pytest.mark.usefixtures("slow_worker")
def test_producer_sees_and_cancels_a_batch_made_over_http(stack: BatchStack) -> None:
    batch = begun(stack, [chat_line(f"r{n}") for n in range(20)])
    in_queue(stack, batch.id)
    listed = orjson.loads(stack.producer("list", "--json"))
    assert batch.id in [found["id"] for found in listed]
    status = orjson.loads(stack.producer("status", batch.id, "--json"))
    assert status["request_counts"]["total"] == 20
    assert [b.id for b in stack.client.batches.list()].count(batch.id) == 1
    stack.producer("cancel", batch.id)
    ended = stack.ended(batch.id)
    assert ended.status == "cancelled"
    failed = lines_of(stack, ended.error_file_id)
    assert len(failed) == ended.request_counts.failed >= 15
    assert {line["error"]["code"] for line in failed} == {"batch_cancelled"}


@pytest.mark.usefixtures("slow_worker")
def test_a_running_batch_is_cancelled_with_what_it_has(stack: BatchStack) -> None:
    batch = begun(stack, [chat_line(f"r{n}") for n in range(20)])
    in_queue(stack, batch.id)
    assert stack.client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    ended = stack.ended(batch.id)
    assert ended.status == "cancelled"
    assert ended.cancelled_at is not None
    assert len(lines_of(stack, ended.error_file_id)) == ended.request_counts.failed >= 15


@pytest.mark.usefixtures("worker")
def test_partial_results_are_read_to_the_end(stack: BatchStack) -> None:
    batch = begun(stack, [chat_line(f"r{n}", f"question {n}") for n in range(2000)])
    in_queue(stack, batch.id)
    partial = {"partial": "true"}
    early = stack.client.batches.retrieve(batch.id, extra_query=partial).output_file_id
    assert early is not None
    assert stack.client.batches.retrieve(batch.id).output_file_id is None
    raw = stack.client.files.with_raw_response
    found: list[str] = []
    incomplete, at = "true", 0
    while incomplete == "true":
        part = raw.content(early, extra_query={"offset": at})
        incomplete, at = part.headers["x-incomplete"], int(part.headers["x-last-line"])
        content = part.http_response.content.splitlines()
        found += [orjson.loads(line)["custom_id"] for line in content]
    assert len(found) == len(set(found)) == at == 2000
    final = stack.client.batches.retrieve(batch.id, extra_query=partial)
    assert final.status == "completed"
    assert set(found) == {line["custom_id"] for line in lines_of(stack, final.output_file_id)}


@pytest.mark.usefixtures("worker")
def test_a_file_that_is_not_one_of_requests_fails_its_batch(stack: BatchStack) -> None:
    ended = stack.ended(begun(stack, [b"no json", b"{}"]).id)
    assert ended.status == "failed"
    assert ended.output_file_id is None
    assert ended.errors.data
    assert ended.errors.data[0].line == 1
