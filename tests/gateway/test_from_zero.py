"""What comes for a model that no worker serves now: from zero workers and back to them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from kit.gateways.http_batches import ended, lines_of, request, upload
from kit.gateways.live_stack import HELLO, MODEL, Stack
from kit.stacks.celery_side import simulated

from demo.stack import eventually
from gateway.redis.api_keys import ApiKeys
from gateway.redis.fleet import UNKNOWN_TOKENS


@pytest.fixture
def asleep(tmp_path: Path) -> Iterator[Stack]:
    """Return a stack without a worker that runs; its model and another one are configured."""
    models = f"{MODEL}, org/large, adapter={MODEL}, tiny=, /models/tiny="
    with Stack(tmp_path, worker=False, gateway_models=models) as found:
        yield found


def create(client: openai.OpenAI, lines: list[dict[str, Any]]) -> Any:
    return client.batches.create(
        input_file_id=upload(client, lines), endpoint="/v1/chat/completions",
        completion_window="24h",
    )  # fmt: skip


def tokens(stack: Stack, model: str = MODEL) -> int:
    """Return what an autoscaler of a model is told."""
    url, params = f"{stack.gateway.url}/warmq/v1/scale", {"model": model} if model else {}
    return int(httpx.get(url, params=params).json()["tokens"])


def test_a_batch_calls_for_a_worker_and_completes_when_it_comes(asleep: Stack) -> None:
    assert tokens(asleep) == 0
    batch = create(asleep.client, [request(f"r{n}") for n in range(30)])
    eventually(lambda: tokens(asleep) == 30 * UNKNOWN_TOKENS, 20, "its lines are told")
    asleep.worker.start()
    batch = ended(asleep.client, batch.id)
    assert (batch.status, batch.request_counts.completed) == ("completed", 30)
    assert tokens(asleep) == 0


def test_lines_of_a_model_without_workers_wait_while_another_model_has_one(asleep: Stack) -> None:
    large = simulated(
        asleep.redis.url, asleep.folder / "large.log", served_model_name="org/large"
    )  # fmt: skip
    asleep.worker.start()
    eventually(asleep.store.announcements, 30, "a worker announces itself")
    lines = [request(f"r{n}", model=[MODEL, "org/large"][n % 2]) for n in range(20)]
    batch = create(asleep.client, lines)
    eventually(lambda: tokens(asleep, "org/large") == 10 * UNKNOWN_TOKENS, 20, "half of it waits")
    with large:
        batch = ended(asleep.client, batch.id)
    assert (batch.status, batch.request_counts.completed) == ("completed", 20)


@pytest.mark.parametrize(("model", "queue"), [("adapter", MODEL), ("tiny", "")])
def test_a_name_can_be_that_of_another_models_workers(
    asleep: Stack, model: str, queue: str
) -> None:
    """An adapter is in its model's queue; a worker without a served name in the default one."""
    create(asleep.client, [request(f"r{n}", model=model) for n in range(3)])
    eventually(lambda: tokens(asleep, queue) == 3 * UNKNOWN_TOKENS, 20, "its lines are told")
    assert tokens(asleep, model) == 0


def test_configured_models_are_listed_without_where_their_folders_are(asleep: Stack) -> None:
    listed = [model.id for model in asleep.client.models.list().data]
    assert listed == ["adapter", "org/large", MODEL, "tiny"]


def test_a_model_that_nobody_has_named_gets_error_lines_beside_those_that_wait(
    asleep: Stack,
) -> None:
    lines = [request("r0"), request("r1", model="unheard-of")]
    batch = create(asleep.client, lines)
    eventually(lambda: tokens(asleep) == UNKNOWN_TOKENS, 20, "one line waits")
    asleep.worker.start()
    batch = ended(asleep.client, batch.id)
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 1)
    (line,) = lines_of(asleep.client, batch.error_file_id)
    assert line["response"]["body"]["error"]["code"] == "model_not_found"


def test_an_online_request_waits_for_the_worker_that_it_calls_for(asleep: Stack) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(
            asleep.client.chat.completions.create, model=MODEL, messages=HELLO, timeout=50
        )
        eventually(lambda: tokens(asleep) == UNKNOWN_TOKENS, 20, "it is told")
        asleep.worker.start()
        assert asleep.said(asked.result()) == asleep.text_of("Hello")


def test_lines_that_name_no_model_are_not_run_by_one_that_their_key_may_not_use(
    tmp_path: Path,
) -> None:
    """As online requests are not: the only model is the only one of those that the key allows."""
    line = request("r0")
    del line["body"]["model"]
    with Stack(tmp_path) as stack:
        secret, _ = ApiKeys.using(stack.store).create("default", models=["other"])
        with openai.OpenAI(base_url=stack.url, api_key=secret, max_retries=0) as client:
            batch = ended(client, create(client, [line]).id)
            assert batch.request_counts.completed == 0
            (found,) = lines_of(client, batch.error_file_id)
    assert found["response"]["body"]["error"]["code"] == "missing_required_parameter"
