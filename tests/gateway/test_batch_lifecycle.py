"""Batches over HTTP to their ends: a real gateway and batch runner, a simulated engine."""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest
from kit.commands.support import producer_command, producer_env, write_lines
from kit.gateways.http_batches import ended, lines_of, request, results, upload
from kit.gateways.live_stack import MODEL, QUEUE, Stack

from demo.stack import eventually

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Return a stack whose engine takes no time."""
    with Stack(tmp_path_factory.mktemp("stack"), gateway_max_requests=5000) as found:
        yield found


@pytest.fixture
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Return a stack without a worker that runs."""
    with Stack(tmp_path_factory.mktemp("alone"), worker=False) as found:
        yield found


def create(stack: Stack, lines: list[dict[str, Any]] | bytes, **fields: Any) -> Any:
    given = {"endpoint": CHAT, "completion_window": "24h"} | fields
    return stack.client.batches.create(input_file_id=upload(stack.client, lines), **given)


def problems(stack: Stack, lines: list[dict[str, Any]] | bytes) -> list[tuple[str, int | None]]:
    batch = ended(stack.client, create(stack, lines).id)
    assert batch.status == "failed"
    assert (batch.output_file_id, batch.error_file_id) == (None, None)
    assert batch.failed_at
    return [(each.code, each.line) for each in batch.errors.data]


def producer(stack: Stack, *args: str | Path) -> str:
    """Run the producer command; return what it prints."""
    done = subprocess.run(
        producer_command(*args), env=producer_env(stack.redis.url), capture_output=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr.decode()
    return done.stdout.decode()


def queued(alone: Stack, lines: int) -> Any:
    """Return a batch whose lines wait in the queue; no worker runs."""
    alone.worker.start()
    eventually(alone.store.announcements, 30, "a worker announces itself")
    alone.worker.kill()
    batch = create(alone, [request(f"r{n}") for n in range(lines)])
    eventually(lambda: alone.waiting() == lines, 20, "all lines wait")
    return batch


def test_a_batch_ends_with_answers_in_the_order_of_its_file(stack: Stack) -> None:
    lines = [request(f"r{n}") for n in range(1200)]
    batch = ended(stack.client, create(stack, lines, metadata={"mine": "1"}).id)
    assert (batch.status, batch.metadata) == ("completed", {"mine": "1"})
    assert (batch.request_counts.total, batch.request_counts.completed) == (1200, 1200)
    assert batch.error_file_id is None and batch.errors is None
    assert batch.model == MODEL
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    output = lines_of(stack.client, batch.output_file_id)
    assert [line["custom_id"] for line in output] == [f"r{n}" for n in range(1200)]
    for line in output:
        text = line["response"]["body"]["choices"][0]["message"]["content"]
        assert text == stack.text_of(line["custom_id"])
    used = [line["response"]["body"]["usage"] for line in output]
    assert batch.usage.input_tokens == sum(u["prompt_tokens"] for u in used)
    assert batch.usage.total_tokens == sum(u["total_tokens"] for u in used)
    file = stack.client.files.retrieve(batch.output_file_id)
    assert (file.purpose, file.status) == ("batch_output", "processed")
    assert file.bytes == len(stack.client.files.content(file.id).read())
    assert file.id in [listed.id for listed in stack.client.files.list()]


def comparable(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line without ids and times."""
    body = {n: v for n, v in line["response"]["body"].items() if n not in ("id", "created")}
    return {"custom_id": line["custom_id"], "error": line["error"], "body": body}


def test_the_same_file_by_producer_submit_gives_the_same_lines(stack: Stack) -> None:
    lines = [request(f"r{n}", seed=1) for n in range(50)]
    batch = ended(stack.client, create(stack, lines).id)
    path = write_lines(stack.folder / "same.jsonl", lines)
    producer(stack, "submit", path, "--model", MODEL, "--wait", "-o", stack.folder / "same.out")
    theirs = [orjson.loads(line) for line in (stack.folder / "same.out").read_bytes().splitlines()]
    ours = lines_of(stack.client, batch.output_file_id)
    assert list(map(comparable, ours)) == list(map(comparable, theirs))


def test_wrong_bodies_and_unknown_models_are_error_lines(stack: Stack) -> None:
    lines = [request(f"r{n}") for n in range(6)]
    lines[1]["body"]["messages"] = 4
    lines[3]["body"]["model"] = "unheard-of"
    batch = ended(stack.client, create(stack, lines).id)
    assert batch.status == "completed"
    assert (batch.request_counts.completed, batch.request_counts.failed) == (4, 2)
    first, second = lines_of(stack.client, batch.error_file_id)
    assert (first["custom_id"], first["response"]["status_code"]) == ("r1", 400)
    assert (second["custom_id"], second["response"]["status_code"]) == ("r3", 404)
    assert second["response"]["body"]["error"]["code"] == "model_not_found"
    assert first["error"] is None and second["error"] is None
    output = lines_of(stack.client, batch.output_file_id)
    assert [line["custom_id"] for line in output] == ["r0", "r2", "r4", "r5"]


def test_all_failed_is_completed_without_an_output_file(stack: Stack) -> None:
    batch = ended(stack.client, create(stack, [request("r0", model="unheard-of")]).id)
    assert (batch.status, batch.output_file_id) == ("completed", None)
    assert len(lines_of(stack.client, batch.error_file_id)) == 1


def test_lines_that_cannot_be_told_apart_refuse_the_file(stack: Stack) -> None:
    lines = [orjson.dumps(request(f"r{n}")) for n in range(6)]
    lines[1] = b"{not json"
    lines[2] = orjson.dumps(request("r0"))
    lines[3] = orjson.dumps({k: v for k, v in request("x").items() if k != "custom_id"})
    lines[4] = orjson.dumps(request("r4") | {"url": "/v1/completions"})
    lines[5] = orjson.dumps(request("r5") | {"method": "GET"})
    assert problems(stack, b"\n".join(lines)) == [
        ("invalid_json_line", 2),
        ("duplicate_custom_id", 3),
        ("missing_required_parameter", 4),
        ("url_mismatch", 5),
        ("invalid_method", 6),
    ]


def test_an_empty_file_and_too_many_lines_are_refused(stack: Stack) -> None:
    assert problems(stack, b"\n\n") == [("empty_file", None)]
    many = [request(f"r{n}") for n in range(5001)]
    assert problems(stack, many) == [("too_many_tasks", None)]


def test_a_batch_whose_results_never_fit_into_redis_is_refused(alone: Stack) -> None:
    """It would wait for room until the end of its window, and hold what others need."""
    with alone.redis.client() as client:
        client.config_set("maxmemory", 6 * 2**20)
    batch = ended(alone.client, create(alone, [request(f"r{n}") for n in range(6000)]).id)
    assert batch.status == "failed"
    (problem,) = batch.errors.data
    assert problem.code == "too_many_tasks"
    assert "split the file into batches of at most 3000 lines" in problem.message


def test_at_most_a_hundred_problems_are_told(stack: Stack) -> None:
    assert len(problems(stack, b"x\n" * 1000)) == 100


def test_an_input_file_may_go_while_its_batch_waits_in_the_queue(alone: Stack) -> None:
    batch = queued(alone, 30)
    alone.client.files.delete(batch.input_file_id)
    alone.worker.start()
    batch = ended(alone.client, batch.id)
    assert (batch.status, batch.request_counts.completed) == ("completed", 30)


def test_an_input_file_may_go_before_its_lines_are_queued(alone: Stack) -> None:
    """Clients delete it as soon as they have the batch's id; OpenAI lets them."""
    batch = create(alone, [request(f"r{n}") for n in range(30)])
    alone.client.files.delete(batch.input_file_id)
    with pytest.raises(openai.NotFoundError):
        alone.client.files.content(batch.input_file_id)
    alone.worker.start()
    batch = ended(alone.client, batch.id)
    assert (batch.status, batch.request_counts.completed) == ("completed", 30)
    with alone.redis.client() as client:  # as some minutes later
        client.zadd("warmq:gateway:due:file", {batch.input_file_id: 0})
    content = alone.folder / "files" / batch.input_file_id
    eventually(lambda: not content.exists(), 20, "its content is swept")


def test_a_batch_waits_for_a_worker_and_runs_when_there_is_one(alone: Stack) -> None:
    batch = create(alone, [request("r0")])
    time.sleep(1.5)  # what must not happen in this time is tested
    assert alone.client.batches.retrieve(batch.id).status == "validating"
    alone.worker.start()
    assert ended(alone.client, batch.id).status == "completed"


def test_a_batch_expires_without_any_worker(alone: Stack) -> None:
    batch = create(alone, [request(f"r{n}") for n in range(700)], completion_window="3s")
    batch = ended(alone.client, batch.id, 20)
    assert (batch.status, batch.output_file_id) == ("expired", None)
    found = lines_of(alone.client, batch.error_file_id)
    assert [line["custom_id"] for line in found] == [f"r{n}" for n in range(700)]
    assert {line["error"]["code"] for line in found} == {"batch_expired"}
    assert {line["response"] for line in found} == {None}


def test_what_is_queued_expires_when_its_workers_have_gone(alone: Stack) -> None:
    alone.worker.start()
    eventually(alone.store.announcements, 30, "a worker announces itself")
    alone.worker.kill()
    batch = create(alone, [request(f"r{n}") for n in range(700)], completion_window="4s")
    eventually(lambda: alone.waiting() == 700, 10, "all lines wait")
    batch = ended(alone.client, batch.id, 20)
    assert (batch.status, batch.request_counts.failed) == ("expired", 700)
    assert results(alone.client, batch) == Counter({f"r{n}": 1 for n in range(700)})


def test_a_cancelled_batch_has_what_was_answered_and_what_was_not(alone: Stack) -> None:
    alone.worker.start()
    eventually(alone.store.announcements, 30, "a worker announces itself")
    lines = [
        request(f"r{n}", **({"user": "simulate:sleep=60"} if n >= 10 else {})) for n in range(900)
    ]
    batch = create(alone, lines)
    eventually(
        lambda: alone.client.batches.retrieve(batch.id).request_counts.completed == 10, 20, "ten"
    )
    assert alone.client.batches.cancel(batch.id).status == "cancelling"
    batch = ended(alone.client, batch.id)
    assert (batch.status, batch.request_counts.completed) == ("cancelled", 10)
    assert results(alone.client, batch) == Counter({f"r{n}": 1 for n in range(900)})
    codes = {line["error"]["code"] for line in lines_of(alone.client, batch.error_file_id)}
    assert codes == {"batch_cancelled"}
    eventually(lambda: alone.running() == 0, 10, f"no request of {QUEUE} runs any more")


def test_models_of_one_file_go_to_their_queues_and_keep_one_order(alone: Stack) -> None:
    from kit.stacks.celery_side import simulated

    other = simulated(alone.redis.url, alone.folder / "other.log", served_model_name="org/large")
    alone.worker.start()
    other.start()
    try:
        eventually(lambda: len(alone.store.announcements()) == 2, 40, "two workers")
        models = [MODEL, "org/large", "unheard-of"]
        lines = [request(f"r{n}", model=models[n % 3]) for n in range(1500)]
        batch = ended(alone.client, create(alone, lines).id)
        assert batch.status == "completed"
        assert (batch.request_counts.completed, batch.request_counts.failed) == (1000, 500)
        output = [line["custom_id"] for line in lines_of(alone.client, batch.output_file_id)]
        assert output == [f"r{n}" for n in range(1500) if n % 3 != 2]
        errors = [line["custom_id"] for line in lines_of(alone.client, batch.error_file_id)]
        assert errors == [f"r{n}" for n in range(1500) if n % 3 == 2]
    finally:
        other.kill()


def test_producer_sees_and_cancels_a_batch_made_over_http(alone: Stack) -> None:
    batch = queued(alone, 20)
    listed = orjson.loads(producer(alone, "list", "--json"))
    assert batch.id in [found["id"] for found in listed]
    status = orjson.loads(producer(alone, "status", batch.id, "--json"))
    assert status["request_counts"]["total"] == 20
    assert [b.id for b in alone.client.batches.list()].count(batch.id) == 1
    producer(alone, "cancel", batch.id)
    cancelled = ended(alone.client, batch.id)
    assert (cancelled.status, cancelled.request_counts.failed) == ("cancelled", 20)
    failed = lines_of(alone.client, cancelled.error_file_id)
    assert {line["error"]["code"] for line in failed} == {"batch_cancelled"}


def test_a_gateway_ends_with_its_batch_runner_in_order(alone: Stack) -> None:
    assert alone.gateway.stop() == 0
    connected = [each.get("name") for each in alone.redis.client().client_list()]
    assert "warmq-batch-runner" not in connected
