"""Batches over HTTP whose lines name several models, of a worker that loads one at a time."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from kit.commands.support import run_producer, write_lines
from kit.gateways.gateway_process import GatewayProcess
from kit.gateways.http_batches import ended, lines_of, request, results, upload
from kit.stacks.stage import Stage, stage

from demo.stack import eventually

MODELS = ("alpha", "beta", "gamma")
#: Stays so short that the tests see several swaps.
ENTRY = {"min_stay": "1s", "max_wait": "2s"}
QUEUES = {f"warmq.{name}" for name in MODELS}


@pytest.fixture
def on(tmp_path: Path) -> Iterator[Stage]:
    with stage(tmp_path) as found:
        given = json.dumps(dict.fromkeys(MODELS, ENTRY))
        found.worker(models=given, simulated_process=True)
        eventually(lambda: found.store.served_queues() == QUEUES, 40, "it serves them")
        yield found


@pytest.fixture
def served(on: Stage, tmp_path: Path) -> Iterator[GatewayProcess]:
    with GatewayProcess(on.server.url, tmp_path) as found:
        yield found


@pytest.fixture
def sdk(served: GatewayProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def mixed(count: int) -> list[dict[str, Any]]:
    return [request(f"r{n}", MODELS[n % 3]) for n in range(count)]


def create(sdk: openai.OpenAI, lines: list[dict[str, Any]]) -> Any:
    return sdk.batches.create(
        input_file_id=upload(sdk, lines), endpoint="/v1/chat/completions", completion_window="24h"
    )


def models_of(lines: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(line["custom_id"], line["response"]["body"]["model"]) for line in lines]


def test_each_line_of_a_file_is_answered_by_its_model_and_a_wrong_one_fails(
    sdk: openai.OpenAI,
) -> None:
    lines = [*mixed(300), request("wrong", "gama")]
    batch = ended(sdk, create(sdk, lines).id, 90)
    assert (batch.status, batch.request_counts.completed) == ("completed", 300)
    assert models_of(lines_of(sdk, batch.output_file_id)) == [
        (f"r{n}", MODELS[n % 3]) for n in range(300)
    ]
    (line,) = lines_of(sdk, batch.error_file_id)
    error = line["response"]["body"]["error"]
    assert (line["custom_id"], error["code"]) == ("wrong", "model_not_found")
    assert "alpha, beta, gamma" in error["message"]


def test_a_cancel_ends_the_lines_of_all_models(sdk: openai.OpenAI, on: Stage) -> None:
    batch = create(sdk, mixed(900))
    eventually(lambda: sdk.batches.retrieve(batch.id).request_counts.completed, 40, "some ended")
    sdk.batches.cancel(batch.id)
    batch = ended(sdk, batch.id, 40)
    assert batch.status == "cancelled"
    assert 0 < batch.request_counts.completed < 900
    assert results(sdk, batch).total() == 900


def test_a_batch_of_anthropics_is_answered_by_all_its_models(served: GatewayProcess) -> None:
    asked = [
        {"custom_id": f"r{n}", "params": {
            "model": MODELS[n % 3], "max_tokens": 5,
            "messages": [{"role": "user", "content": f"question {n}"}]}}
        for n in range(60)
    ]  # fmt: skip
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as sdk:
        given: Any = asked
        batch = sdk.messages.batches.create(requests=given)
        until = time.monotonic() + 60
        while sdk.messages.batches.retrieve(batch.id).processing_status != "ended":
            assert time.monotonic() < until
            time.sleep(0.1)  # not a synchronisation: it is asked until it has ended
        found = {}
        for line in sdk.messages.batches.results(batch.id):
            assert line.result.type == "succeeded", line
            found[line.custom_id] = line.result.message.model
    assert found == {f"r{n}": MODELS[n % 3] for n in range(60)}


def test_a_batch_of_producer_submit_is_shown_with_all_its_queues(
    served: GatewayProcess, sdk: openai.OpenAI, on: Stage, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "in", mixed(600))
    run_producer("submit", path, "--batch-id", "b1", redis_url=on.server.url)
    page = httpx.get(f"{served.url}/ui/batches/b1", follow_redirects=True)
    assert page.status_code == 200 and "b1" in page.text
    assert httpx.get(f"{served.url}/metrics").status_code == 200
    batch = ended(sdk, "b1", 90)
    assert (batch.status, batch.request_counts.completed) == ("completed", 600)
    assert models_of(lines_of(sdk, batch.output_file_id)) == [
        (f"r{n}", MODELS[n % 3]) for n in range(600)
    ]
