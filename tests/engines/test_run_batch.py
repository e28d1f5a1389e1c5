"""The same files through `vllm run-batch` of the installed release and through a worker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.engines.run_batch_lines import (
    ENDING,
    FAILING,
    GENERATING,
    NAME,
    POOLED,
    POOLED_FAILING,
    POOLING,
    RED,
    SEEN,
    SERVING,
    UNSEEN,
    seeing,
)
from kit.engines.run_batch_process import BESIDE, RunBatch, comparable
from kit.servers.pictures import site
from kit.stacks.celery_side import client_app
from kit.stacks.real_stack import Stack, read_jsonl, write_jsonl
from options.vision import SQUARE_TOKENS, WIDE_TOKENS, make_vision_model
from packaging.version import Version

from contract.redis.batches import BatchStore
from demo.stack import CPU_ENGINE_ARGS, RedisServer, tiny_model_worker

pytestmark = pytest.mark.timeout(300)
QUEUE = f"warmq.{NAME}"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Return a running Redis; no worker."""
    folder = tmp_path_factory.mktemp("run-batch")
    with RedisServer(folder / "redis") as server, server.client() as client:
        app = client_app(server.url)
        yield Stack(server.url, folder, client, BatchStore(client, ttl_ms=600_000), app)
        app.close()


def through_worker(
    stack: Stack, source: Path, words: str, **settings: Any
) -> dict[str, dict[str, Any]]:
    """Return a worker's output lines by custom_id, those of errors, too."""
    out, errors = source.with_suffix(".out.jsonl"), source.with_suffix(".err.jsonl")
    with tiny_model_worker(
        stack.url, stack.folder / f"{source.stem}.worker.log", served_model_name=NAME,
        engine_args=f"{CPU_ENGINE_ARGS} {words}", env=BESIDE, **settings,
    ) as worker:  # fmt: skip
        stack.ready(worker, QUEUE)
        run = stack.producer("submit", source, "--model", NAME, "--wait", "-o", out,
                             "--errors", errors)  # fmt: skip
    assert run.returncode == 1, run.stderr  # some lines are wrong
    return {found["custom_id"]: found for found in [*read_jsonl(out), *read_jsonl(errors)]}


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
    model, folder = make_vision_model(stack.folder / "seeing"), stack.folder / "site"
    folder.mkdir()
    (folder / "red.png").write_bytes(RED)
    with site(folder) as (address, fetched), site(folder) as (their_address, fetched_by_theirs):
        served = [*GENERATING, *seeing(their_address)]
        source = write_jsonl(stack.folder / "generating.jsonl", served)
        with RunBatch(source, SERVING, model) as running:
            served = [*GENERATING, *seeing(address)]
            source = write_jsonl(stack.folder / "all.jsonl", [*served, *ENDING])
            ours = through_worker(stack, source, SERVING, model=model, media_private_networks=True)
            theirs = running.lines()
    # Of the lines that end run-batch only they themselves fail here
    from vllm import __version__ as vllm_version
    from vllm.entrypoints.launchers.run_batch import BatchRequestInput
    from vllm.exceptions import VLLMClientError

    for ending in ENDING:
        with pytest.raises((ValueError, VLLMClientError)):
            BatchRequestInput.model_validate_json(json.dumps(ending))
        assert ours.pop(ending.get("custom_id", f"line-{len(served) + len(ENDING)}"))["error"]
    # Where max_tokens does not fit, vLLM silently generates fewer since 0.32; a worker refuses.
    less = {"too long"} if Version(vllm_version) >= Version("0.32") else set[str]()
    assert not any(found["error"] for found in theirs if found["custom_id"] in less)
    bodies = compare(
        [found for found in theirs if found["custom_id"] not in less],
        {cid: found for cid, found in ours.items() if cid not in less},
        (FAILING | UNSEEN) - less,
    )
    # What was to be compared is there
    choices = {cid: body["choices"][0] for cid, body in bodies.items() if body}
    (call,) = choices["tool by itself"]["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Busan"}
    assert json.loads(choices["json"]["message"]["content"]) in ({"n": 5}, {"n": 6})
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
    check_images(bodies)
    messages = {found["custom_id"]: found["error"] for found in theirs}
    for refused in UNSEEN:
        message = messages[refused]["error"]["message"].replace(their_address, address)
        assert message in ours[refused]["error"]["message"]
    # Each side fetched for itself
    assert sorted(fetched) == sorted(fetched_by_theirs) == ["/none.png 404", "/red.png 200"]


def check_images(bodies: dict[str, Any]) -> None:
    """Images stand in the prompt, where their line puts them, and change what is said."""
    tokens = {cid: body["usage"]["prompt_tokens"] for cid, body in bodies.items() if body}
    plain = tokens["no image"]
    assert tokens["red"] == tokens["image first"] == tokens["fetched"] == plain + SQUARE_TOKENS
    assert tokens["two images"] == plain + 2 * SQUARE_TOKENS
    assert tokens["wide"] == plain + WIDE_TOKENS
    red, first = (bodies[cid]["prompt_token_ids"] for cid in ("red", "image first"))
    assert red != first
    assert sorted(red) == sorted(first)
    said = {cid: comparable(bodies[cid]["choices"]) for cid in SEEN}
    assert said["fetched"] == said.pop("red")
    assert len({json.dumps(choices) for choices in said.values()}) == len(said)
    assert said["no image"][0]["message"]["content"] == "5"


def test_embeddings_scores_and_rerankings_are_those_of_run_batch(stack: Stack) -> None:
    source = write_jsonl(stack.folder / "pooled.jsonl", POOLED)
    with RunBatch(source, POOLING) as running:
        ours = through_worker(stack, source, POOLING)
        theirs = running.lines()
    bodies = compare(theirs, ours, POOLED_FAILING)
    assert len(bodies["texts"]["data"]) == 2
    assert len(bodies["text"]["data"][0]["embedding"]) > 8
    assert [len(bodies[name]["results"]) for name in ("rerank", "rerank v1")] == [2, 1]
    told = ours["generating"]["error"]["message"]
    assert "/v1/embeddings" in told.partition("serves ")[2].partition(", not ")[0]
    assert "multimodal" in ours["an image"]["error"]["message"]
