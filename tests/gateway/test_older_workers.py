"""Workers of an older protocol: nothing is queued where only they would look."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from kit.gateways.http_batches import ended, request, upload
from kit.gateways.live_stack import HELLO, MODEL, QUEUE, Stack
from kit.stacks.older_worker import announce

from contract.version import PROTOCOL
from gateway.redis.api_keys import ApiKeys

OLD, NEW = "celery@10.1.2.3.12.0a", "celery@10.1.2.4.13.0b"


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with Stack(tmp_path, worker=False) as found:
        yield found


def create(client: openai.OpenAI, model: str = MODEL, **fields: Any) -> Any:
    return client.batches.create(
        input_file_id=upload(client, [request("r0", model=model)]),
        endpoint="/v1/chat/completions", completion_window="24h", **fields,
    )  # fmt: skip


def say(stack: Stack, worker: str, **told: Any) -> None:
    with stack.redis.client() as client:
        announce(client, worker, **({"queue": QUEUE} | told))


def test_a_batch_is_refused_while_all_workers_are_older(stack: Stack) -> None:
    say(stack, OLD)
    with pytest.raises(openai.ConflictError) as caught:
        create(stack.client)
    assert (caught.value.code, caught.value.param) == ("older_workers", None)
    assert "nothing was queued: all workers are older than this gateway" in caught.value.message
    assert "(warmq 0.1.0, protocol 1)" in caught.value.message
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert stack.client.batches.list().data == []


def test_a_batch_fails_whose_model_has_older_workers_alone(stack: Stack) -> None:
    say(stack, OLD)
    say(stack, NEW, queue="warmq.other", protocol=PROTOCOL)
    batch = ended(stack.client, create(stack.client).id)
    assert batch.status == "failed"
    (problem,) = batch.errors.data
    assert problem.code == "older_workers"
    assert f"nothing was queued: all workers of model '{MODEL}' are older" in problem.message
    assert "10.1.2.3" not in problem.message
    assert stack.waiting() == 0


def test_a_batch_is_queued_for_the_newer_ones_of_a_models_workers(stack: Stack) -> None:
    say(stack, OLD)
    say(stack, NEW, protocol=PROTOCOL)
    batch = create(stack.client)
    stack.worker.start()
    assert ended(stack.client, batch.id).status == "completed"


def test_an_online_request_is_not_queued_for_older_workers_alone(tmp_path: Path) -> None:
    with Stack(tmp_path, worker=False, gateway_models=f"{MODEL},later") as stack:
        say(stack, OLD)
        say(stack, NEW, queue="warmq.other", protocol=PROTOCOL)
        with pytest.raises(openai.InternalServerError) as caught:
            stack.client.chat.completions.create(model=MODEL, messages=HELLO)
        assert (caught.value.status_code, caught.value.code) == (503, "no_worker")
        assert "older than this gateway" in caught.value.message
        assert stack.waiting() == 0
        assert [model.id for model in stack.client.models.list().data] == ["later", "other"]
        assert httpx.get(f"{stack.url}/models/{MODEL}").status_code == 404


def test_who_is_no_operator_is_told_how_many_older_workers_there_are_and_not_where(
    stack: Stack,
) -> None:
    say(stack, OLD)
    say(stack, "celery@10.1.2.5.12.0a", queue="warmq.other")
    made = ApiKeys.using(stack.store).create
    keys = {False: made("default")[0], True: made("default", operator=True)[0]}
    for operator, key in keys.items():
        with (
            openai.OpenAI(base_url=stack.url, api_key=key, max_retries=0) as client,
            pytest.raises(openai.ConflictError) as caught,
        ):
            create(client)
        assert ("10.1.2.3" in caught.value.message) is operator
        assert ("2 of warmq 0.1.0 (protocol 1)" in caught.value.message) is not operator
