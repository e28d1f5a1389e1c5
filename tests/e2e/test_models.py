"""Several models on one worker, with vLLM: each line is answered by the model of its queue."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import orjson
import psutil
import pytest
from kit.commands.doctor_findings import doctor, levels
from kit.commands.support import as_json, run_producer
from kit.stacks.three_models import BEFORE, entries_in

from contract.redis.batches import BatchStore
from demo.stack import CPU_ENGINE_ARGS, MODEL, RedisServer, Worker, eventually

QUESTIONS = 300


def models_and_lines(folder: Path) -> tuple[dict[str, dict[str, str]], Path]:
    """Return the entries of WARMQ_MODELS, and a file of lines."""
    lines = folder / "lines.jsonl"
    lines.write_bytes(b"\n".join(
        orjson.dumps({"custom_id": f"q{n}", "messages": [{"role": "user", "content": f"Count {n}"}],
                      "max_tokens": 2, "temperature": 0}) for n in range(QUESTIONS)
    ))  # fmt: skip
    return entries_in(folder), lines


def assert_answered_by_its_model(url: str) -> None:
    """Assert that each batch, named as its model, has that model's answers."""
    tokens = {}
    for name in BEFORE:
        done = run_producer("results", name, redis_url=url)
        answers = [json.loads(line)["response"]["body"] for line in done.stdout.splitlines()]
        assert [answer["model"] for answer in answers] == [name] * QUESTIONS
        tokens[name] = [answer["usage"]["prompt_tokens"] for answer in answers]
    for name in ("middle", "long"):
        more = {a - b for a, b in zip(tokens[name], tokens["short"], strict=True)}
        assert len(more) == 1 and more.pop() > 0, name
    assert tokens["middle"] < tokens["long"]


@pytest.mark.timeout(900)
def test_each_line_is_answered_by_its_model_in_few_swaps(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    entries, lines = models_and_lines(tmp_path)
    log, url = tmp_path / "worker.log", redis_server.url
    for name in BEFORE:
        done = run_producer("submit", lines, "--model", name, "--batch-id", name, redis_url=url)
        assert done.returncode == 0, done.stderr
    with (
        redis_server.client() as client,
        Worker(url, log, models=json.dumps(entries)),
        closing(BatchStore(client, ttl_ms=600_000)) as store,
    ):
        for name in BEFORE:
            eventually(lambda name=name: (b := store.batch(name)) and b.finished, 400, name, 0.2)
    assert_answered_by_its_model(url)
    # Two swaps are needed; none is made back and forth.
    assert log.read_text().count("swapping from model") <= 3


@pytest.mark.timeout(600)
def test_a_folder_that_is_missing_fails_its_queue_alone(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    missing = tmp_path / "missing"
    entries = {
        "bad": {"path": str(missing)},
        "good": {"path": str(MODEL), "engine_args": CPU_ENGINE_ARGS},
    }
    line = {"custom_id": "q1", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    lines = tmp_path / "lines.jsonl"
    lines.write_bytes(orjson.dumps(line))
    url = redis_server.url
    for name in ("bad", "good"):
        done = run_producer("submit", lines, "--model", name, "--batch-id", name, redis_url=url)
        assert done.returncode == 0, done.stderr
    with (
        redis_server.client() as client,
        Worker(url, tmp_path / "worker.log", models=json.dumps(entries)),
        closing(BatchStore(client, ttl_ms=600_000)) as store,
    ):
        eventually(lambda: (b := store.batch("good")) and b.finished, 300, "good", 0.2)
        eventually(
            lambda: any(one.get("unloadable") for one in store.announcements()),
            120, "a try to load bad", 0.2,
        )  # fmt: skip
        found = doctor(url, 1)
        assert levels(found, "problem") == {"model_unloadable"}
        assert str(missing) in found["model_unloadable"]["text"]
        shown = run_producer("status", "bad", redis_url=url).stdout
        assert str(missing) in shown
        assert (
            as_json(run_producer("status", "bad", "--json", redis_url=url))["request_counts"][
                "in_progress"
            ]
            == 1
        )


@pytest.mark.timeout(900)
def test_two_models_are_loaded_and_served_at_the_same_time(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    entries, lines = models_and_lines(tmp_path)
    entries["middle"]["with"] = entries["long"]["with"] = "short"
    log, url = tmp_path / "worker.log", redis_server.url
    # Several engines on one machine: bound to cores, all would be bound to the same one.
    env = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    with (
        redis_server.client() as client,
        Worker(url, log, env=env, models=json.dumps(entries)) as worker,
        closing(BatchStore(client, ttl_ms=600_000)) as store,
    ):

        def ready() -> bool:
            found = {w["served"] for w in store.announcements() if w["state"] == "ready"}
            return found == set(BEFORE)

        eventually(ready, 400, "all are ready", 0.2)
        engines = psutil.Process(worker.pid).children(recursive=True)
        for name in BEFORE:
            done = run_producer("submit", lines, "--model", name, "--batch-id", name, redis_url=url)
            assert done.returncode == 0, done.stderr
        for name in BEFORE:
            eventually(lambda name=name: (b := store.batch(name)) and b.finished, 400, name, 0.2)
        assert worker.stop() == 0
    assert_answered_by_its_model(url)
    assert "swapping from model" not in log.read_text()
    # The last to end sees that its worker is gone, and needs the CPU for that.
    assert psutil.wait_procs(engines, timeout=30)[1] == []
