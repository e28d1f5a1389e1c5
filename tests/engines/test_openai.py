"""A worker in front of a real vLLM server with the shipped model, compared with vLLM in process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.engines.conformance import conform
from kit.engines.in_process import InProcess
from kit.servers.vllm_server import KEY, VllmServer
from kit.stacks.celery_side import client_app
from kit.stacks.real_stack import Stack, frozen, read_jsonl, write_jsonl

from contract.openai.body import CHAT_URL, COMPLETION_URL
from contract.redis.batches import BatchStore
from demo.stack import RedisServer, Worker, eventually
from worker.engine import EngineRequest
from worker.engine.openai import OpenAISettings
from worker.engine.openai.engine import OpenAIEngine

pytestmark = pytest.mark.timeout(300)
LINES = 300
#: Two best tokens nearer than this are a tie, which the order of a batch may decide.
TIE = 1e-3


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Return a running Redis; no worker."""
    folder = tmp_path_factory.mktemp("openai")
    with RedisServer(folder / "redis") as server, server.client() as client:
        app = client_app(server.url)
        yield Stack(server.url, folder, client, BatchStore(client, ttl_ms=600_000), app)
        app.close()


@pytest.fixture(scope="module")
def remote(stack: Stack, vllm_server: VllmServer) -> Iterator[Worker]:
    """Return a worker in front of the server."""
    with Worker(
        stack.url, stack.folder / "remote.log", engine="openai", openai_base_urls=vllm_server.url,
        openai_api_key=KEY, lease_s=5,
    ) as worker:  # fmt: skip
        stack.ready(worker)
        yield worker


def bare(body: dict[str, Any]) -> dict[str, Any]:
    """Return what both engines must answer alike; each has its own name of the model."""
    return {name: value for name, value in body.items() if name not in ("id", "created", "model")}


def is_tie(server: VllmServer, line: dict[str, Any], one: str, other: str) -> bool:
    """Whether the two best tokens are a tie where two texts part."""
    chat = line["url"] == CHAT_URL
    wanted = {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
    logprobs = server.ask(line["url"], line["body"] | wanted)["choices"][0]["logprobs"]
    if chat:
        tokens = [step["token"] for step in logprobs["content"]]
        tops = [[top["logprob"] for top in step["top_logprobs"]] for step in logprobs["content"]]
    else:
        tokens = logprobs["tokens"]
        tops = [list(top.values()) for top in logprobs["top_logprobs"]]
    so_far = ""
    for token, top in zip(tokens, tops, strict=True):
        so_far += token
        if not (one.startswith(so_far) and other.startswith(so_far)):
            best, second = sorted(top, reverse=True)[:2]
            return bool(best - second < TIE)
    return False


def test_the_same_file_has_the_same_answers_in_process_and_through_a_vllm_server(
    stack: Stack, in_process: InProcess, vllm_server: VllmServer, remote: Worker
) -> None:
    lines = {cid: line for cid, line in in_process.lines.items() if cid.startswith("q")}
    expected = in_process.bodies
    source = write_jsonl(stack.folder / "in.jsonl", list(lines.values()))
    out = stack.folder / "remote.jsonl"
    run = stack.producer("submit", source, "--batch-id", "remote", "--wait", "-o", out)
    assert run.returncode == 0, run.stderr
    found = {line["custom_id"]: line["response"]["body"] for line in read_jsonl(out)}
    stats = stack.stats()
    assert stats["engine"] == "openai"
    assert stats["max_model_len"] == 1024
    assert len(found) == len(lines) == LINES
    differing = [cid for cid in lines if bare(found[cid]) != bare(expected[cid])]
    for custom_id in differing:
        texts = [
            choice.get("text") or choice["message"]["content"]
            for choice in (found[custom_id]["choices"][0], expected[custom_id]["choices"][0])
        ]
        assert is_tie(vllm_server, lines[custom_id], *texts), (found[custom_id], texts)
    assert len(differing) <= LINES // 100
    assert KEY not in remote.log_path.read_text()
    assert KEY not in json.dumps(stats)


CHAT_BODY = {"messages": [{"role": "user", "content": "What is 2 + 3?"}], "max_tokens": 24}
TEXT_BODY = {"prompt": "2 + 3 =", "max_tokens": 24, "ignore_eos": True}
#: Without max_tokens; most of the context is the prompt's, which is faster than as many answers.
MANY = "What is 2 + 3? " * 60
LONG_CHAT = {"messages": [{"role": "user", "content": MANY}], "ignore_eos": True}
LONG_TEXT = {"prompt": MANY, "ignore_eos": True}
FORMS = {
    "chat": CHAT_BODY | {"temperature": 0},
    "logprobs": CHAT_BODY | {"temperature": 0, "logprobs": True, "top_logprobs": 3},
    "n": CHAT_BODY | {"n": 3, "seed": 1, "logprobs": True, "ignore_eos": True},
    "token ids": CHAT_BODY | {"return_token_ids": True, "return_prompt_text": True},
    "stop": CHAT_BODY | {"temperature": 0, "stop": ["5"]},
    "echo": CHAT_BODY | {"temperature": 0, "echo": True},
    "text logprobs": TEXT_BODY | {"temperature": 0, "logprobs": 2},
    "text stop": TEXT_BODY | {"temperature": 0, "logprobs": 0, "stop": [" is wrong"]},
    "texts": TEXT_BODY | {"prompt": ["2 + 3 =", "a b"], "n": 2, "seed": 2, "logprobs": 1},
    "tokens": TEXT_BODY | {"prompt": [1, 23, 226], "temperature": 0, "return_token_ids": True},
    "prompt logprobs": TEXT_BODY | {"temperature": 0, "prompt_logprobs": 1},
    "text echo": TEXT_BODY | {"temperature": 0, "echo": True, "logprobs": 1},
}


async def test_every_form_of_answer_equals_the_one_the_server_gives_at_once(
    vllm_server: VllmServer,
) -> None:
    engine = OpenAIEngine(
        OpenAISettings(
            engine="openai", openai_base_urls=vllm_server.url, openai_api_key=KEY, model=None
        )
    )
    await engine.start()
    try:
        for name, fields in FORMS.items():
            body: dict[str, Any] = {"seed": 7, **fields}
            url = CHAT_URL if "messages" in body else COMPLETION_URL
            answer = await engine.generate(EngineRequest(url, body), "same")
            at_once = vllm_server.ask(url, body)
            assert rounded(bare(json.loads(answer.body))) == rounded(bare(at_once)), name
            assert json.loads(answer.body)["id"] == at_once["id"]
            assert answer.completion_tokens == at_once["usage"]["completion_tokens"]
        for url, body in ((CHAT_URL, LONG_CHAT), (COMPLETION_URL, LONG_TEXT)):
            # Our default of 1024 does not fit: it becomes what the context leaves
            answer = await engine.generate(EngineRequest(url, body), "long")
            assert answer.completion_tokens > 0
            assert answer.prompt_tokens + answer.completion_tokens == 1024
    finally:
        await engine._close()


def rounded(value: Any) -> Any:
    """Floats to five digits: a cached prefix is computed in another order."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def test_a_cancelled_batch_is_aborted_inside_the_server(
    stack: Stack, vllm_server: VllmServer, remote: Worker
) -> None:
    source = write_jsonl(stack.folder / "long.jsonl", [
        {"prompt": f"{n} + 3 =", "max_tokens": 1000, "ignore_eos": True} for n in range(200)
    ])  # fmt: skip
    ended = vllm_server.metric("vllm:request_success_total")
    with frozen(remote):
        run = stack.producer("submit", source, "--batch-id", "long")
        assert run.returncode == 0, run.stderr
    eventually(lambda: vllm_server.metric("vllm:num_requests_running") >= 16, 30, "running")
    stack.store.cancel(stack.batch("long"))  # at once: a command takes long to start
    eventually(lambda: vllm_server.metric("vllm:num_requests_running") == 0, 30, "aborted")
    # On a machine that stands still for seconds some run to their length before the cancel comes.
    assert vllm_server.metric("vllm:request_success_total") < ended + 100
    assert stack.batch("long").number("cancelled") > 0


def test_a_vllm_server_killed_in_a_batch_and_restarted_loses_nothing(
    stack: Stack, vllm_server: VllmServer, remote: Worker
) -> None:
    source = write_jsonl(stack.folder / "killed.jsonl", [
        {"prompt": f"{n} + 3 =", "max_tokens": 8 if n < 40 else 1000, "ignore_eos": True}
        for n in range(80)
    ])  # fmt: skip
    with frozen(remote):
        run = stack.producer("submit", source, "--batch-id", "killed")
        assert run.returncode == 0, run.stderr
    eventually(lambda: stack.batch("killed").number("completed") >= 10, 30, "answers")
    with frozen(remote):
        assert stack.batch("killed").number("completed") < 80
        vllm_server.kill()
    eventually(lambda: "rebuilding the engine" in remote.log_path.read_text(), 60, "noticed")
    vllm_server.start()
    eventually(lambda: stack.batch("killed").finished, 120, "finished")
    assert stack.batch("killed").number("completed") == 80


# The tiny model answers within a second: on a machine with two busy loops the engine reads behind
# the server, and no request is met in the middle of its answer.
@pytest.mark.slow
def test_the_engine_conforms(vllm_server: VllmServer, tmp_path: Path) -> None:
    # The last test of this file: it kills the server.
    assert vllm_server.process is not None
    conform(
        tmp_path, server=vllm_server.process.pid, inside=(False, True),
        engine="openai", openai_base_urls=vllm_server.url, openai_api_key=KEY, openai_concurrency=4,
    )  # fmt: skip
