"""vLLM's options in the worker's own process. tests/options runs all of them, these are the few
that many use: shards, and adapters with prefix caching."""

from __future__ import annotations

import re
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from kit.stacks.celery_side import client_app
from kit.stacks.real_stack import (
    Stack,
    asked,
    completion_prompt,
    listed_questions,
    read_jsonl,
    text_of,
    write_jsonl,
)
from options.checkpoints import make_adapter
from options.rows import CACHED, NOBIND, STATS
from prometheus_client.parser import text_string_to_metric_families

from contract.naming import TASK_NAME
from contract.redis.batches import BatchStore
from demo.stack import (
    CPU_ENGINE_ARGS,
    RedisServer,
    Worker,
    eventually,
    free_port,
    tiny_model_worker,
)

pytestmark = pytest.mark.timeout(300)
QUESTIONS = listed_questions(40, seed=71)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Return a running Redis; no worker."""
    folder = tmp_path_factory.mktemp("options")
    with RedisServer(folder / "redis") as server, server.client() as client:
        app = client_app(server.url)
        yield Stack(server.url, folder, client, BatchStore(client, ttl_ms=600_000), app)
        app.close()


def run(stack: Stack, name: str, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the output lines of a file."""
    source = write_jsonl(stack.folder / f"{name}.in.jsonl", lines)
    out, errors = stack.folder / f"{name}.jsonl", stack.folder / f"{name}.errors.jsonl"
    stack.producer("submit", source, "--wait", "-o", out, "--errors", errors)
    return read_jsonl(out) + (read_jsonl(errors) if errors.exists() else [])


@contextmanager
def ready(stack: Stack, name: str, args: str, **more: Any) -> Iterator[Worker]:
    """Run a worker with further options of vLLM."""
    with tiny_model_worker(
        stack.url, stack.folder / f"{name}.log",
        engine_args=f"{CPU_ENGINE_ARGS} {args}", **more,
    ) as worker:  # fmt: skip
        stack.ready(worker)
        yield worker


def test_two_shards_answer_as_one(stack: Stack) -> None:
    lines = [asked(q, n % 2 == 0) for n, q in enumerate(QUESTIONS)]
    args = "--tensor-parallel-size 2 --distributed-executor-backend mp"
    with ready(stack, "shards", args, env=NOBIND):
        results = run(stack, "shards", lines)
        assert stack.stats()["details"]["tensor_parallel_size"] == 2
    assert [text_of(r["response"]["body"]) for r in results] == [q.answer for q in QUESTIONS]


@pytest.fixture(scope="module")
def too_small(stack: Stack) -> Iterator[Worker]:
    """Return a worker that has just started, whose cache holds no request of full length."""
    # Where the size comes from vLLM's own variable only the engine knows that it is too small.
    with tiny_model_worker(
        stack.url, stack.folder / "small.log", queue="small",
        engine_args="--max-model-len 400000 --dtype float32 --enforce-eager "
        "--gpu-memory-utilization 0.2",
        env={"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"},
    ) as worker:  # fmt: skip
        yield worker


@pytest.fixture(scope="module")
def port() -> int:
    """Return the port of the metrics of the worker with adapters."""
    return free_port()


@pytest.fixture(scope="module")
def adapted(stack: Stack, too_small: Worker, port: int) -> Iterator[Worker]:
    """Return a worker with two adapters and prefix caching.

    The one that is too small starts beside it: the start of an engine keeps one core busy.
    """
    folder = stack.folder
    noisy, silent = make_adapter(folder / "noisy"), make_adapter(folder / "silent", strength=0)
    loras = f"--enable-lora --max-loras 3 --max-lora-rank 8 --lora-modules noisy={noisy}"
    args = f"{loras} silent={silent} {CACHED}"
    with ready(stack, "adapted", args, env=STATS, metrics_port=port, engine_log="-") as worker:
        yield worker


def test_a_line_chooses_its_adapter_and_an_unknown_name_is_its_own_error(
    stack: Stack, adapted: Worker
) -> None:
    names = [None, "silent", "noisy", "unknown"]
    lines = [
        asked(question, False, **({"model": name} if name else {})) | {"custom_id": f"{name}{n}"}
        for n, question in enumerate(QUESTIONS[:8]) for name in names
    ]  # fmt: skip
    by_id = {result["custom_id"]: result for result in run(stack, "adapters", lines)}
    answers = {
        name: [text_of(by_id[f"{name}{n}"]["response"]["body"]) for n in range(8)]
        for name in names if name != "unknown"
    }  # fmt: skip
    expected = [question.answer for question in QUESTIONS[:8]]
    assert answers[None] == answers["silent"] == expected
    assert answers["noisy"] != expected
    assert by_id["noisy0"]["response"]["body"]["model"] == "noisy"
    for n in range(8):
        error = by_id[f"unknown{n}"]["error"]
        assert error["code"] == "model_not_found"
        assert "`unknown` does not exist" in error["message"]
        assert "noisy, silent" in error["message"]


def test_a_common_beginning_is_computed_once(stack: Stack, adapted: Worker) -> None:
    start = "\n".join(f"{completion_prompt(q)} {q.answer}" for q in QUESTIONS[8:20])
    lines = [
        {"prompt": f"{start}\n{completion_prompt(q)}", "temperature": 0, "max_tokens": 32,
         "ignore_eos": True}
        for q in QUESTIONS[:8]
    ]  # fmt: skip
    run(stack, "first", lines)
    usages = [r["response"]["body"]["usage"] for r in run(stack, "second", lines)]
    # All but the last, unfinished block of 32 tokens is there from the first time.
    assert all(u["prompt_tokens_details"]["cached_tokens"] >= u["prompt_tokens"] - 64
               for u in usages)  # fmt: skip
    hits = re.compile(r"Prefix cache hit rate: [1-9]")
    eventually(lambda: hits.search(adapted.log_path.read_text()), 20, "vLLM's own statistics")


def vllm_series(port: int) -> Counter[str]:
    """Return the values of vLLM's series on a worker's page, added over their labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    found = Counter[str]()
    for family in families:
        for sample in family.samples:
            found[sample.name.removeprefix("vllm:")] += int(sample.value)
    return found


@pytest.mark.usefixtures("adapted")
def test_vllms_own_series_move_on_the_workers_page(stack: Stack, port: int) -> None:
    before = vllm_series(port)
    lines = [asked(q, False, ignore_eos=True, max_tokens=16) for q in QUESTIONS[:8]]
    usages = [r["response"]["body"]["usage"] for r in run(stack, "series", lines)]
    prompts = sum(usage["prompt_tokens"] for usage in usages)
    expected = {
        "request_success_total": 8,
        "prompt_tokens_total": prompts,
        "generation_tokens_total": 8 * 16,
        "prefix_cache_queries_total": prompts,
    }

    def moved() -> dict[str, int]:
        now = vllm_series(port)
        return {name: now[name] - before[name] for name in expected}

    eventually(lambda: moved() == expected, 20, "vLLM has counted them", 0.2)
    long = asked(QUESTIONS[0], False, ignore_eos=True, max_tokens=400)
    many = [stack.app.send_task(TASK_NAME, args=[long], queue="warmq") for _ in range(300)]
    eventually(lambda: vllm_series(port)["num_requests_running"] > 0, 60, "they run", 0.1)
    stack.app.control.revoke([result.id for result in many])
    for result in many:
        result.get(timeout=60, propagate=False)


def test_a_cache_too_small_for_one_request_is_answered_with_settings(too_small: Worker) -> None:
    assert too_small.process is not None
    assert too_small.process.wait(120) == 1
    text = too_small.log_path.read_text()
    # 1 GiB less a block of 128 tokens, at 5,120 bytes a token.
    assert "holds 209536 tokens; --max-model-len is 400000. Write --max-model-len 209536" in text
