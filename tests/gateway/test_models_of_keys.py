"""A key for some models never gets another one, least of all by naming none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import orjson
import pytest
from kit.commands.support import chat_line
from kit.gateways.batch_stack import ENDED
from kit.gateways.live_stack import HELLO, QUEUE, Stack

from contract.openai.body import min_body
from demo.stack import eventually
from gateway.http.idempotency import ONLINE_BODY_TYPES
from gateway.redis.api_keys import ApiKeys

#: Bodies, as JSON, that name no model; where the field is there twice, the last one counts.
UNNAMED = [
    b'{"prompt":"x"}', b'{"model":null,"prompt":"x"}',
    b'{"model":"small","prompt":"x","model":null}',
    b'{"prompt":"x","m\\u006fdel":null}',
]  # fmt: skip


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A gateway whose operator has named a model and its adapters; nobody takes what is queued."""
    folder = tmp_path_factory.mktemp("models")
    named = "small,lora=small,second=small"
    with Stack(folder, worker=False, gateway_models=named, gateway_online_timeout_s=1) as made:
        yield made


@pytest.fixture(autouse=True)
def empty(stack: Stack) -> Iterator[None]:
    yield
    for key in stack.store.queue_lengths(QUEUE):
        stack.store._client.delete(key)


def key_for(stack: Stack, *models: str) -> str:
    secret, _ = ApiKeys.using(stack.store).create("t", models=models)
    return secret


def post(stack: Stack, key: str, raw: bytes, path: str = "/v1/completions") -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{stack.gateway.url}{path}", content=raw, headers=headers)


def queued(stack: Stack) -> list[Any]:
    """Return the bodies that wait."""
    return [orjson.loads(message["body"])[0][0] for message in stack.messages()]


@pytest.mark.parametrize("raw", UNNAMED)
def test_the_only_model_of_a_key_is_asked_for_where_none_is_named(stack: Stack, raw: bytes) -> None:
    key = key_for(stack, "lora")
    assert post(stack, key, raw).status_code == 503  # nobody answered in time
    (body,) = queued(stack)
    assert body["model"] == "lora"
    assert body["prompt"] == "x"


@pytest.mark.parametrize("url", list(ONLINE_BODY_TYPES))
def test_it_is_so_at_every_url(stack: Stack, url: str) -> None:
    key = key_for(stack, "lora")
    assert post(stack, key, orjson.dumps(min_body(url)), url).status_code == 503
    assert [body["model"] for body in queued(stack)] == ["lora"]


@pytest.mark.parametrize("raw", UNNAMED)
def test_a_key_for_two_adapters_has_to_say_which(stack: Stack, raw: bytes) -> None:
    key = key_for(stack, "lora", "second")
    answer = post(stack, key, raw)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "model"
    assert error["message"] == "you must name a model; this key may use lora, second"
    assert not queued(stack)


def test_a_key_for_a_model_and_its_adapter_gets_the_model(stack: Stack) -> None:
    key = key_for(stack, "lora", "small")
    post(stack, key, UNNAMED[0])
    assert [body["model"] for body in queued(stack)] == ["small"]


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b'{"model":"small","prompt":"x"}', 403),
        (b'{"model":"lora","prompt":"x","model":"small"}', 403),
        (b'{"model":"","prompt":"x"}', 400),
        (b'{"model":["lora"],"prompt":"x"}', 400),
        (b'{"model":0,"prompt":"x"}', 400),
        (b'{"model":" lora","prompt":"x"}', 403),
    ],
)
def test_what_is_no_name_of_its_models_is_refused(stack: Stack, raw: bytes, status: int) -> None:
    answer = post(stack, key_for(stack, "lora"), raw)
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == "model"
    assert not queued(stack)


def test_a_key_for_all_models_names_none_as_before(stack: Stack) -> None:
    secret, _ = ApiKeys.using(stack.store).create("t")
    post(stack, secret, UNNAMED[0])
    assert ["model" in body for body in queued(stack)] == [False]


# -- batches -----------------------------------------------------------------------------


def batch_of(
    stack: Stack, key: str, lines: list[bytes], url: str = "/v1/chat/completions", **more: Any
) -> Any:
    """Return a batch of these lines when its lines are queued, or it has ended."""
    client = openai.OpenAI(base_url=stack.url, api_key=key, max_retries=0)
    made = client.files.create(file=("in.jsonl", b"\n".join(lines)), purpose="batch")
    batch = client.batches.create(
        input_file_id=made.id,
        endpoint=url,  # type: ignore[arg-type]
        completion_window="24h",
        extra_body=more,
    )

    def look() -> Any:
        found = client.batches.retrieve(batch.id)
        done = found.request_counts and found.request_counts.failed == len(lines)
        return found if found.status in ENDED or done or len(queued(stack)) == len(lines) else None

    return eventually(look, 30, "its lines are queued", every_s=0.1)


def lines_without_a_name() -> list[bytes]:
    lines = [orjson.dumps(chat_line(f"r{n}", f"text {n}")) for n in range(3)]
    lines.append(orjson.dumps(chat_line("r3", model=None)))
    lines.append(orjson.dumps(chat_line("r4", model="small"))[:-2] + b',"model":null}}')
    return lines


@pytest.mark.parametrize("order", ["input", "prefix"])
def test_lines_that_name_no_model_ask_for_the_only_one_of_their_key(
    stack: Stack, order: str
) -> None:
    key = key_for(stack, "lora")
    named = orjson.dumps(chat_line("r5", model="lora"))
    batch_of(stack, key, [*lines_without_a_name(), named], order=order)
    assert [body["model"] for body in queued(stack)] == ["lora"] * 6
    assert {body["messages"][0]["content"] for body in queued(stack)} >= {"text 0", "text 2"}


def test_a_batch_of_responses_and_one_of_messages_are_no_way_round(stack: Stack) -> None:
    key, url = key_for(stack, "lora"), "/v1/responses"
    line = {"custom_id": "a", "method": "POST", "url": url, "body": {"input": "x"}}
    batch_of(stack, key, [orjson.dumps(line)], url)
    assert [body["model"] for body in queued(stack)] == ["lora"]
    client = anthropic.Anthropic(base_url=stack.gateway.url, api_key=key, max_retries=0)
    params: Any = {"max_tokens": 4, "messages": HELLO}
    with pytest.raises(anthropic.BadRequestError, match=r"params.model: name a model"):
        client.messages.batches.create(requests=[{"custom_id": "a", "params": params}])


def test_a_line_is_given_a_name_and_all_else_of_it_stays(tmp_path: Path) -> None:
    from gateway.batches.runner.input_file import with_model

    raw = b'{"custom_id":"a","body":{"seed":12345678901234567890123,"x":[1.0,"\\u00e9"]}}'
    assert with_model(raw, "l") == raw[:-2] + b',"model":"l"}}'
    for kept in (
        b"",
        b"x",
        b"[]",
        b'{"body":[]}',
        b'{"body":{"model":""}}',
        b'{"body":{"model":1}}',
    ):
        assert with_model(kept, "l") == kept


def test_lines_that_do_not_say_which_of_two_adapters_are_refused(stack: Stack) -> None:
    stack.worker.start()
    eventually(stack.store.announcements, 30, "a worker announces itself")
    key = key_for(stack, "lora", "second")
    batch = batch_of(stack, key, lines_without_a_name())
    assert batch.request_counts.failed == 5
    client = openai.OpenAI(base_url=stack.url, api_key=key, max_retries=0)
    # All may have failed before it has ended, and its file is there.
    written = eventually(
        lambda: client.batches.retrieve(batch.id).error_file_id, 30, "the batch ends"
    )
    errors = client.files.content(written).text
    told = "field body.model: is missing; name a model; served models: lora, second"
    assert errors.count(told) == 5, errors[:600]
    assert stack.started() == 0
