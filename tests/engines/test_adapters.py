"""Adapters on demand, with vLLM: a line gets the adapter whose folder its model names.

One adapter may be loaded at a time, so that each other one has to wait for its place.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import torch
from kit.gateways.gateway_process import GatewayProcess
from kit.stacks.celery_side import client_app
from kit.stacks.real_stack import (
    Stack,
    asked,
    frozen,
    listed_questions,
    read_jsonl,
    text_of,
    write_jsonl,
)
from options.checkpoints import make_adapter
from safetensors.torch import load_file, save_file

from contract.redis.batches import BatchStore
from demo.stack import CPU_ENGINE_ARGS, RedisServer, Worker, eventually, tiny_model_worker

pytestmark = pytest.mark.timeout(300)
QUESTIONS = listed_questions(8, seed=36)
NAMES = ("first", "second", "third")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Return a running Redis; no worker."""
    folder = tmp_path_factory.mktemp("adapters")
    with RedisServer(folder / "redis") as server, server.client() as client:
        app = client_app(server.url)
        yield Stack(server.url, folder, client, BatchStore(client, ttl_ms=600_000), app)
        app.close()


@pytest.fixture(scope="module")
def folder(stack: Stack) -> Path:
    """Return a folder with three adapters that answer differently, and one that changes nothing."""
    for seed, name in enumerate(NAMES):
        make_adapter(stack.folder / "all" / name, seed=seed + 1)
    make_adapter(stack.folder / "all" / "silent", strength=0)
    return stack.folder / "all"


@pytest.fixture(scope="module")
def worker(stack: Stack, folder: Path) -> Iterator[Worker]:
    """Return a worker that has room for one adapter."""
    args = f"{CPU_ENGINE_ARGS} --enable-lora --max-loras 2 --max-lora-rank 8"
    with tiny_model_worker(
        stack.url, stack.folder / "worker.log", engine_args=args, adapters=folder,
        served_model_name="base",
    ) as worker:  # fmt: skip
        stack.ready(worker, "warmq.base")
        yield worker


def run(stack: Stack, name: str, lines: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the results of a file by custom_id, after each of its requests has one."""
    source = write_jsonl(stack.folder / f"{name}.in.jsonl", lines)
    out, errors = stack.folder / f"{name}.jsonl", stack.folder / f"{name}.errors.jsonl"
    stack.producer(
        "submit", source, "--model", "base", "--wait", "-o", out, "--errors", errors
    )  # fmt: skip
    found = read_jsonl(out) + (read_jsonl(errors) if errors.exists() else [])
    assert sorted(r["custom_id"] for r in found) == sorted(line["custom_id"] for line in lines)
    return {result["custom_id"]: result for result in found}


def mixed(names: tuple[str | None, ...]) -> list[dict[str, Any]]:
    """Return lines of all questions whose models alternate."""
    return [
        asked(question, False, **({"model": name} if name else {})) | {"custom_id": f"{name}{n}"}
        for n, question in enumerate(QUESTIONS) for name in names
    ]  # fmt: skip


def answers(results: dict[str, dict[str, Any]], name: str | None) -> list[str]:
    return [text_of(results[f"{name}{n}"]["response"]["body"]) for n in range(len(QUESTIONS))]


def message(result: dict[str, Any], code: str) -> str:
    assert result["error"]["code"] == code
    return str(result["error"]["message"])


def deaths(stack: Stack) -> int:
    (announced,) = stack.store.announcements()
    return int(announced["deaths"])


def test_each_line_gets_its_adapter_although_one_is_loaded_at_a_time(
    stack: Stack, worker: Worker
) -> None:
    names = (None, "base", "silent", *NAMES)
    results = run(stack, "mixed", mixed(names))
    assert answers(results, None) == answers(results, "base") == answers(results, "silent")
    assert answers(results, None) == [question.answer for question in QUESTIONS]
    different = [answers(results, name) for name in (None, *NAMES)]
    assert all(one != other for n, one in enumerate(different) for other in different[:n])
    for name in names[1:]:
        assert results[f"{name}0"]["response"]["body"]["model"] == name
    # Alone, each gives the same answers: none was mixed up with another one.
    for name in NAMES:
        assert answers(run(stack, f"alone-{name}", mixed((name,))), name) == answers(results, name)


def test_the_gateway_offers_the_folders_names(stack: Stack, worker: Worker, folder: Path) -> None:
    with GatewayProcess(stack.url, stack.folder) as gateway:
        client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)

        def offered() -> list[str]:
            return [model.id for model in client.models.list()]

        eventually(lambda: offered() == sorted(["base", "silent", *NAMES]), 30, "the names")
        alone = answers(run(stack, "queued", mixed(("first",))), "first")
        for n, question in enumerate(QUESTIONS[:2]):
            body = asked(question, False) | {"model": "first"}
            answer = client.completions.create(**body)
            assert (answer.model, answer.choices[0].text.strip()) == ("first", alone[n])
        with pytest.raises(openai.NotFoundError) as raised:
            client.completions.create(prompt="x", model="frist")
        assert raised.value.code == "model_not_found"
        assert "did you mean first?" in raised.value.message
        with pytest.raises(openai.NotFoundError):
            client.completions.create(prompt="x", model="../all/first")


def test_an_adapter_that_cannot_be_loaded_is_the_error_of_its_own_lines(
    stack: Stack, worker: Worker, folder: Path
) -> None:
    make_adapter(folder / "deep", rank=16)
    (make_adapter(folder / "bare") / "adapter_model.safetensors").unlink()
    (make_adapter(folder / "cut") / "adapter_model.safetensors").write_bytes(b"\x08")
    (make_adapter(folder / "unread") / "adapter_config.json").write_text("{")
    weights = make_adapter(folder / "other") / "adapter_model.safetensors"
    save_file({k: torch.randn(99, 99) for k in load_file(weights)}, weights)
    config = make_adapter(folder / "dora") / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"use_dora": True}))
    bad = ("deep", "bare", "cut", "unread", "other", "dora")
    results = run(stack, "bad", mixed((*bad, "first", "zzz", "../all/first", None)))
    assert answers(results, None) == [question.answer for question in QUESTIONS]
    assert len(answers(results, "first")) == len(QUESTIONS)
    for n in range(len(QUESTIONS)):
        texts = [message(results[f"{name}{n}"], "adapter_unusable") for name in bad]
        assert "--max-lora-rank 16" in texts[0] and "no weights" in texts[1]
        assert "adapter_config.json cannot be read" in texts[3] and "DoRA" in texts[5]
        for name, text in zip(bad, texts, strict=True):
            assert f"the adapter {name} cannot be loaded" in text
            assert str(stack.folder) not in text
        assert "did you mean" not in message(results[f"zzz{n}"], "model_not_found")
        message(results[f"../all/first{n}"], "model_not_found")
    assert deaths(stack) == 0
    for name in bad:
        shutil.rmtree(folder / name)


def test_a_new_folder_is_found_and_a_removed_one_forgotten(
    stack: Stack, worker: Worker, folder: Path
) -> None:
    def announced() -> list[str]:
        (found,) = stack.store.announcements()
        return list(found["adapters"])

    eventually(lambda: announced() == sorted(["silent", *NAMES]), 30, "the names")
    make_adapter(folder / "late", seed=9)
    results = run(stack, "late", mixed(("late",)))
    assert results["late0"]["response"]["body"]["model"] == "late"
    eventually(lambda: "late" in announced(), 30, "the new name")
    # Its place is given to another one, and its folder is gone when it is asked for again.
    run(stack, "others", mixed(("first",)))
    shutil.rmtree(folder / "late")
    results = run(stack, "gone", mixed(("late", "first")))
    assert len(answers(results, "first")) == len(QUESTIONS)
    assert "there are: first" in message(results["late0"], "model_not_found")
    eventually(lambda: "late" not in announced(), 30, "the names without it")
    assert deaths(stack) == 0


def test_a_changed_adapter_is_read_again_when_it_is_loaded_again(
    stack: Stack, worker: Worker, folder: Path
) -> None:
    make_adapter(folder / "changing", seed=4)
    before = answers(run(stack, "before", mixed(("changing",))), "changing")
    shutil.rmtree(folder / "changing")
    make_adapter(folder / "changing", seed=5)
    run(stack, "between", mixed(("first",)))
    assert answers(run(stack, "after", mixed(("changing",))), "changing") != before


def test_a_dead_engine_is_rebuilt_and_each_line_still_gets_its_adapter(
    stack: Stack, worker: Worker
) -> None:
    expected = {name: answers(run(stack, f"was-{name}", mixed((name,))), name) for name in NAMES}
    before = deaths(stack)
    # Answers so long that most of the lines wait for an adapter when the engine dies.
    slow = [
        line | {"custom_id": f"slow{n}", "max_tokens": 200, "ignore_eos": True}
        for n, line in enumerate(mixed(NAMES))
    ]
    source = write_jsonl(stack.folder / "slow.in.jsonl", slow)
    with frozen(worker):  # a command may take longer to end than the answers do
        stack.producer("submit", source, "--model", "base", "--batch-id", "slow")
    eventually(lambda: stack.in_flight("warmq.base") > len(NAMES), 30, "in flight")
    for process in psutil.Process(worker.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "EngineCore" in (process.cmdline() or [""])[0]:
                process.kill()
    results = run(stack, "after-death", mixed(NAMES))
    assert {name: answers(results, name) for name in NAMES} == expected
    assert deaths(stack) == before + 1
    eventually(lambda: (b := stack.store.batch("slow")) and b.finished, 120, "the slow ones", 0.2)
    assert stack.store.batch("slow").number("failed") == 0  # type: ignore[union-attr]
