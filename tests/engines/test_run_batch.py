"""The same files through `vllm run-batch` of the installed release and through a worker.

The lines have the forms of run-batch's documented example and of its own tests: chats with a
system message, an unknown model, a bad url, a stream, tools, reasoning, embeddings, scores,
rerankings. Where the model's text must say something, it is forced by structured output.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from real_stack import Stack, read_jsonl, write_jsonl

from contract.body import CHAT_URL
from contract.store import BatchStore
from demo.stack import CPU_ENGINE_ARGS, MODEL, ROOT, RedisServer, tiny_model_worker

pytestmark = pytest.mark.timeout(300)
NAME = "tiny"
QUEUE = f"warmq.{NAME}"
PARSERS = (
    "--enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser granite "
    "--structured-outputs-config '"
    '{"backend": "xgrammar", "enable_in_reasoning": true, "disable_any_whitespace": true}'
    "'"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Seoul", "Busan"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Busan"}}</tool_call>'
THOUGHT = "Here is my thought process: two and three. Here is my response: 5"
POOLING = "--runner pooling --convert embed"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Return a running Redis; no worker."""
    folder = tmp_path_factory.mktemp("run-batch")
    with RedisServer(folder / "redis") as server, server.client() as client:
        app = Celery("stranger", broker=server.url, backend=server.url, set_as_current=False)
        yield Stack(server.url, folder, client, BatchStore(client, ttl_ms=600_000), app)
        app.close()


def line(custom_id: str, url: str, **body: Any) -> dict[str, Any]:
    body = {"model": NAME, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def chat(custom_id: str, **body: Any) -> dict[str, Any]:
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "What is 2 + 3?"},
    ]
    settings = {"temperature": 0, "seed": 7, "max_tokens": 80}
    return line(custom_id, CHAT_URL, **({"messages": messages} | settings | body))


def forced(custom_id: str, text: str, **body: Any) -> dict[str, Any]:
    """Return a chat whose answer is this text."""
    pattern = re.sub(r"([{}.])", r"\\\1", text)
    return chat(custom_id, structured_outputs={"regex": pattern}, max_tokens=400, **body)


GENERATING = [
    chat("example", max_tokens=None, max_completion_tokens=100),
    chat("unlimited", max_tokens=None, ignore_eos=True),
    chat("too long", max_tokens=1023),
    chat("logprobs", logprobs=True, top_logprobs=3),
    chat("logprobs of each", logprobs=True, top_logprobs=0, n=2, temperature=1, ignore_eos=True),
    chat("prompt logprobs", prompt_logprobs=1),
    chat("token ids", return_token_ids=True),
    chat("json", response_format={"type": "json_schema", "json_schema": {
        "name": "answer", "schema": {"type": "object", "properties": {"n": {"enum": [5, 6]}},
                                     "required": ["n"], "additionalProperties": False}}}),
    forced("text", "no tool"),
    forced("tool by itself", CALL, tools=[TOOL], tool_choice="auto"),
    forced("tool not used", "no tool", tools=[TOOL], tool_choice="auto"),
    chat("tool required", tools=[TOOL], tool_choice="required"),
    chat("tool named", tools=[TOOL],
         tool_choice={"type": "function", "function": {"name": "get_weather"}}),
    forced("thought", THOUGHT),
    forced("thought hidden", THOUGHT, include_reasoning=False),
    forced("thought with logprobs", THOUGHT, logprobs=True),
    chat("unknown model", model="NonExistModel"),
    chat("a stream", stream=True),
    chat("an image", messages=[{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}]),
    line("bad url", "/bad_url", messages=[{"role": "user", "content": "x"}]),
    line("pooling", "/v1/embeddings", input="x"),
]  # fmt: skip
FAILING = {"too long", "unknown model", "a stream", "an image", "bad url", "pooling"}
#: Lines that end run-batch before anything is written; nothing there catches what they raise.
ENDING: list[dict[str, Any]] = [
    chat("tool unknown", tools=[TOOL],
         tool_choice={"type": "function", "function": {"name": "no_such"}}),
    chat("no number", max_tokens="many"),
    {"invalid_field": "no id"} | {k: v for k, v in chat("").items() if k != "custom_id"},
]  # fmt: skip
DOCUMENTS = ["2 + 3 is 5.", "Seoul is a city."]
POOLED = [
    line("text", "/v1/embeddings", input="What is 2 + 3?"),
    line("texts", "/v1/embeddings", input=["What is 2 + 3?", "Hello"]),
    line("tokens", "/v1/embeddings", input=[[1, 2, 3], [4]]),
    line("messages", "/v1/embeddings", messages=[{"role": "user", "content": "Hello"}]),
    line("base64", "/v1/embeddings", input="Hello", encoding_format="base64"),
    line("cut", "/v1/embeddings", input="Hello " * 2000, truncate_prompt_tokens=100),
    line("score", "/score", queries="What is 2 + 3?", documents=DOCUMENTS),
    line("score v1", "/v1/score", text_1=DOCUMENTS, text_2=DOCUMENTS),
    line("rerank", "/rerank", query="What is 2 + 3?", documents=DOCUMENTS),
    line("rerank v1", "/v1/rerank", query="What is 2 + 3?", documents=DOCUMENTS, top_n=1),
    line("rerank v2", "/v2/rerank", query="What is 2 + 3?", documents=DOCUMENTS),
    line("too long", "/v1/embeddings", input="Hello " * 2000),
    line("dimensions", "/v1/embeddings", input="Hello", dimensions=8),
    line("generating", CHAT_URL, messages=[{"role": "user", "content": "x"}]),
]
POOLED_FAILING = {"too long", "dimensions", "generating"}


def run_batch(folder: Path, source: Path, words: str) -> tuple[int, list[dict[str, Any]]]:
    """Return vLLM's exit status and output lines; its log is beside the source."""
    out = source.with_suffix(".vllm.jsonl")
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.run_batch", "-i", str(source), "-o",
        str(out), "--model", str(MODEL), "--served-model-name", NAME,
        *shlex.split(f"{CPU_ENGINE_ARGS} {words}"),
    ]  # fmt: skip
    env = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with (folder / f"{source.stem}.vllm.log").open("wb") as log:
        status = subprocess.run(command, cwd=ROOT, env=env, stdout=log, stderr=log, check=False)
    return status.returncode, read_jsonl(out) if out.exists() else []


def through_worker(stack: Stack, source: Path, words: str) -> dict[str, dict[str, Any]]:
    """Return a worker's output lines by custom_id, those of errors, too."""
    out, errors = source.with_suffix(".out.jsonl"), source.with_suffix(".err.jsonl")
    with tiny_model_worker(
        stack.url, stack.folder / f"{source.stem}.worker.log", served_model_name=NAME,
        engine_args=f"{CPU_ENGINE_ARGS} {words}",
    ) as worker:  # fmt: skip
        stack.ready(worker, QUEUE)
        run = stack.producer("submit", source, "--model", NAME, "--wait", "-o", out,
                             "--errors", errors)  # fmt: skip
    assert run.returncode == 1, run.stderr  # some lines are wrong
    return {found["custom_id"]: found for found in [*read_jsonl(out), *read_jsonl(errors)]}


def comparable(value: Any) -> Any:
    """Without what differs between two runs of one server: ids, times, the last digits."""
    if isinstance(value, dict):
        return {k: comparable(v) for k, v in value.items() if k not in ("id", "created")}
    if isinstance(value, list):
        return [comparable(inner) for inner in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def compare(
    theirs: list[dict[str, Any]], ours: dict[str, dict[str, Any]], failing: set[str]
) -> dict[str, Any]:
    """Compare bodies field by field; return ours by custom_id."""
    assert {found["custom_id"] for found in theirs} == set(ours)
    assert {found["custom_id"] for found in theirs if found["error"]} == failing
    for found in theirs:
        mine = ours[found["custom_id"]]
        if found["error"]:
            assert mine["error"]["message"], mine
        else:
            assert mine["error"] is None, mine
            body = found["response"]["body"]
            assert comparable(mine["response"]["body"]) == comparable(body), found["custom_id"]
    return {cid: found["response"] and found["response"]["body"] for cid, found in ours.items()}


def test_chats_have_the_answers_and_errors_of_run_batch(stack: Stack) -> None:
    ours = through_worker(
        stack, write_jsonl(stack.folder / "all.jsonl", [*GENERATING, *ENDING]), PARSERS
    )
    source = write_jsonl(stack.folder / "generating.jsonl", GENERATING)
    status, theirs = run_batch(stack.folder, source, PARSERS)
    assert status == 0
    # Of the lines that end run-batch only they themselves fail here
    from vllm.entrypoints.launchers.run_batch import BatchRequestInput
    from vllm.exceptions import VLLMClientError

    for ending in ENDING:
        with pytest.raises((ValueError, VLLMClientError)):
            BatchRequestInput.model_validate_json(json.dumps(ending))
        assert ours.pop(ending.get("custom_id", f"line-{len(GENERATING) + len(ENDING)}"))["error"]
    bodies = compare(theirs, ours, FAILING)
    # What was to be compared is there
    choices = {cid: body["choices"][0] for cid, body in bodies.items() if body}
    (call,) = choices["tool by itself"]["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Busan"}
    assert choices["json"]["message"]["content"] in ('{"n": 5}', '{"n": 6}')
    assert choices["tool not used"]["message"]["content"] == "no tool"
    assert "two and three" in choices["thought"]["message"]["reasoning"]
    assert choices["thought"]["message"]["content"].strip() == "5"
    assert not choices["thought hidden"]["message"].get("reasoning")
    assert len(choices["logprobs"]["logprobs"]["content"][0]["top_logprobs"]) == 3
    # And our errors say more than that there is one
    codes = {cid: found["error"]["code"] for cid, found in ours.items() if found["error"]}
    assert codes["too long"] == "context_length_exceeded"
    assert codes["unknown model"] == "model_not_found"
    assert codes["bad url"] == codes["pooling"] == "unknown_url"
    assert "multimodal" in ours["an image"]["error"]["message"]


def test_embeddings_scores_and_rerankings_are_those_of_run_batch(stack: Stack) -> None:
    source = write_jsonl(stack.folder / "pooled.jsonl", POOLED)
    ours = through_worker(stack, source, POOLING)
    status, theirs = run_batch(stack.folder, source, POOLING)
    assert status == 0
    bodies = compare(theirs, ours, POOLED_FAILING)
    assert len(bodies["texts"]["data"]) == 2
    assert len(bodies["text"]["data"][0]["embedding"]) > 8
    assert [len(bodies[name]["results"]) for name in ("rerank", "rerank v1")] == [2, 1]
    assert "serves /v1/embeddings" in ours["generating"]["error"]["message"]
