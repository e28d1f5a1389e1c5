"""Background responses through a real gateway and a worker with the simulated engine."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import orjson
import pytest
from kit.gateways.gateway_process import GatewayProcess
from kit.gateways.live_stack import MODEL, Stack
from kit.gateways.other_clients import judge_recorded, program, run_node
from kit.redis_servers.proxy import Proxy

from demo.stack import eventually
from gateway.redis.api_keys import ApiKeys
from gateway.redis.responses import request_id_of, response_key

ENDED = ("completed", "failed", "cancelled", "incomplete")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("background")) as made:
        yield made


def create(stack: Stack, client: openai.OpenAI | None = None, **fields: Any) -> Any:
    """Return a new background response."""
    given = {"model": MODEL, "input": "Hello", "background": True} | fields
    return (client or stack.client).responses.create(**given)


def ended(client: openai.OpenAI, response_id: str) -> Any:
    """Return a response when it has ended."""

    def look() -> Any:
        found = client.responses.retrieve(response_id)
        return found if found.status in ENDED else None

    return eventually(look, 20, f"{response_id} ends", every_s=0.1)


def has_status(stack: Stack, response_id: str, status: str) -> None:
    eventually(
        lambda: stack.client.responses.retrieve(response_id).status == status,
        20, f"{response_id} is {status}", 0.1,
    )  # fmt: skip


def is_missing(client: openai.OpenAI, response_id: str) -> None:
    """Assert that no call of a client finds a response."""
    calls: list[Callable[[str], Any]] = [
        client.responses.retrieve, client.responses.cancel, client.responses.delete,
        client.responses.input_items.list,
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(openai.NotFoundError) as caught:
            call(response_id)
        assert caught.value.code == "response_not_found"


def starts(stack: Stack, response_id: str) -> int:
    """Return how often the engine has begun to compute a response."""
    return stack.log.read_text().count(f"start {request_id_of(response_id)} ")


def key_client(stack: Stack, tenant: str, **limits: Any) -> openai.OpenAI:
    secret, _ = ApiKeys.using(stack.store).create(tenant, **limits)
    return openai.OpenAI(base_url=stack.url, api_key=secret, max_retries=0)


# -- the SDK, unchanged ------------------------------------------------------------------------


def test_a_response_is_created_and_retrieved_when_it_has_ended(stack: Stack) -> None:
    made = create(stack, metadata={"a": "b"}, instructions="Be brief.")
    assert (made.status, made.background) == ("queued", True)
    found = ended(stack.client, made.id)
    assert found.status == "completed"
    assert found.output_text.startswith("simulated ")
    assert (found.id, found.created_at) == (made.id, made.created_at)
    assert (found.metadata, found.instructions) == ({"a": "b"}, "Be brief.")
    assert found.usage.total_tokens == 2
    assert found.completed_at >= found.created_at
    assert starts(stack, made.id) == 1


def test_one_that_runs_is_in_progress_and_ends_where_it_is_cancelled(stack: Stack) -> None:
    made = create(stack, user="simulate:sleep=60")
    has_status(stack, made.id, "in_progress")
    assert stack.client.responses.cancel(made.id).status == "cancelled"
    eventually(lambda: stack.running() == 0, 10, "the engine has ended it", 0.1)
    assert stack.client.responses.cancel(made.id).status == "cancelled"
    assert stack.client.responses.retrieve(made.id).output == []


def test_one_that_waits_is_queued_and_never_starts_where_it_is_cancelled(stack: Stack) -> None:
    running = [create(stack, user="simulate:sleep=60").id for _ in range(4)]  # all slots
    for response_id in running:
        has_status(stack, response_id, "in_progress")
    waiting = create(stack)
    assert stack.client.responses.retrieve(waiting.id).status == "queued"
    assert stack.client.responses.cancel(waiting.id).status == "cancelled"
    for response_id in running:
        stack.client.responses.cancel(response_id)
    last = create(stack)
    assert ended(stack.client, last.id).status == "completed"
    assert starts(stack, waiting.id) == 0
    assert stack.client.responses.retrieve(waiting.id).status == "cancelled"


def test_a_deleted_response_is_gone_with_its_result(stack: Stack) -> None:
    made = create(stack)
    ended(stack.client, made.id)
    assert stack.client.responses.delete(made.id) is None
    is_missing(stack.client, made.id)
    kept = stack.store._client.keys(f"*{request_id_of(made.id)}*")
    assert kept == []


def test_a_deleted_response_that_runs_ends(stack: Stack) -> None:
    made = create(stack, user="simulate:sleep=60")
    has_status(stack, made.id, "in_progress")
    answer = httpx.delete(f"{stack.url}/responses/{made.id}")
    assert answer.json() == {"id": made.id, "object": "response", "deleted": True}
    eventually(lambda: stack.running() == 0, 10, "the engine has ended it", 0.1)


def test_a_failed_attempt_is_a_failed_response(stack: Stack) -> None:
    found = ended(stack.client, create(stack, user="simulate:fail").id)
    assert (found.status, found.error.code) == ("failed", "server_error")
    assert found.error.type == "request_failed"


def test_input_items_come_newest_first_in_pages(stack: Stack) -> None:
    entries = [{"role": "user", "content": f"question {n}"} for n in range(5)]
    made = create(stack, input=entries)
    items = list(stack.client.responses.input_items.list(made.id, limit=2))
    texts = [item.content[0].text for item in items]  # type: ignore[union-attr]
    assert texts == [f"question {n}" for n in reversed(range(5))]
    first = stack.client.responses.input_items.list(made.id, order="asc", limit=1)
    assert first.data[0].content[0].text == "question 0"  # type: ignore[union-attr]
    with pytest.raises(openai.NotFoundError) as caught:
        stack.client.responses.input_items.list(made.id, after="msg_none")
    assert caught.value.code == "item_not_found"


def test_every_try_with_one_idempotency_key_is_one_response(stack: Stack) -> None:
    headers = {"Idempotency-Key": "background-1"}
    ids = {create(stack, extra_headers=headers).id for _ in range(3)}
    (only,) = ids
    ended(stack.client, only)
    assert starts(stack, only) == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"stream": True}, "stream"), ({"store": False}, "store"), ({"background": "x"}, "background"),
     ({"previous_response_id": "resp_1"}, "previous_response_id"), ({"input": []}, "input")],
)  # fmt: skip
def test_what_is_wrong_is_refused_with_its_name(stack: Stack, fields: Any, param: str) -> None:
    body = {"model": MODEL, "input": "x", "background": True} | fields
    answer = httpx.post(f"{stack.url}/responses", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_response_is_not_streamed_later_either(stack: Stack) -> None:
    made = create(stack)
    with pytest.raises(openai.BadRequestError) as caught:
        stack.client.responses.retrieve(made.id, stream=True)
    assert caught.value.param == "stream"


def test_a_create_is_a_line_of_the_audit(stack: Stack) -> None:
    made = create(stack)

    def audited() -> list[Any]:
        lines = stack.gateway.log_path.read_text().splitlines()
        found = [orjson.loads(line) for line in lines if line.startswith('{"event"')]
        return [line for line in found if line["object_id"] == made.id]

    (line,) = eventually(audited, 10, "the line is written", 0.1)
    assert (line["method"], line["route"], line["status"]) == ("POST", "/v1/responses", 200)
    assert line["bytes_in"] > 50
    assert line["bytes_out"] > 200


# -- tenants, keys and budgets -----------------------------------------------------------------


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[Stack]:
    """A stack with keys, whose worker has not been started."""
    with Stack(tmp_path, worker=False, gateway_models=f"{MODEL},other") as made:
        yield made


def test_a_tenant_sees_only_its_own_and_keys_models_and_budgets_hold(keyed: Stack) -> None:
    mine = key_client(keyed, "mine", models=[MODEL], enqueued_tokens=150)
    theirs = key_client(keyed, "theirs")
    made = create(keyed, mine, max_output_tokens=100)
    is_missing(theirs, made.id)
    with pytest.raises(openai.PermissionDeniedError) as denied:
        create(keyed, mine, model="other")
    assert denied.value.code == "model_not_allowed"
    with pytest.raises(openai.RateLimitError) as limited:
        create(keyed, mine, max_output_tokens=100)
    assert limited.value.code == "insufficient_quota"
    assert mine.responses.cancel(made.id).status == "cancelled"
    assert create(keyed, mine, max_output_tokens=100).status == "queued"


def test_it_waits_at_the_priority_of_batches_or_of_flex(keyed: Stack) -> None:
    client = key_client(keyed, "t", highest_priority=5)
    create(keyed, client)
    create(keyed, client, service_tier="flex")
    assert keyed.waiting_by_step() == {"6": 1, "3": 1}
    priorities = {m["properties"]["priority"] for m in keyed.messages()}
    assert priorities == {5, 6}


# -- crashes -----------------------------------------------------------------------------------


@pytest.mark.timeout(120)
def test_a_gateway_killed_between_record_and_push_loses_and_doubles_nothing(
    tmp_path: Path,
) -> None:
    with ExitStack() as open_until_end:
        stack = open_until_end.enter_context(Stack(tmp_path))
        proxy = open_until_end.enter_context(Proxy(stack.redis.port))
        (tmp_path / "dies").mkdir()
        dies = GatewayProcess(proxy.url, tmp_path / "dies", gateway_store=tmp_path / "files")
        open_until_end.callback(dies.kill)
        dies.start()
        stack.gateway.kill()  # no other gateway looks after the response meanwhile
        body = {"model": MODEL, "input": "first", "background": True}
        # Then Redis has all scripts, and each of them is one command.
        assert httpx.post(f"{dies.url}/v1/responses", json=body).status_code == 200
        proxy.delay_reply(b"a marked input", 60)
        pool = open_until_end.enter_context(ThreadPoolExecutor(1))
        body["input"] = "a marked input"
        asking = pool.submit(httpx.post, f"{dies.url}/v1/responses", json=body, timeout=60)
        client = stack.store._client

        def record() -> str:
            found = [key for key in client.keys("warmq:gateway:response:*")
                     if b"a marked input" in client.hget(key, "body")]  # fmt: skip
            return found[0].decode().rpartition(":")[2] if found else ""

        response_id = eventually(record, 20, "the record is written", 0.05)
        dies.kill()
        assert asking.exception(20) is not None
        assert client.hget(response_key(response_id), "pushed") is None
        second = GatewayProcess(stack.redis.url, tmp_path, gateway_store=tmp_path / "files")
        open_until_end.callback(second.kill)
        second.start()
        with openai.OpenAI(base_url=f"{second.url}/v1", api_key="none") as asks:
            eventually(
                lambda: asks.responses.retrieve(response_id).status == "completed",
                40, "another gateway has queued it", 0.2,
            )  # fmt: skip
        assert starts(stack, response_id) == 1


# -- other SDKs --------------------------------------------------------------------------------

EXPECTED = {
    "created": "queued", "background": True, "ended": "completed", "text": "simulated",
    "items": ["Hello"], "cancelled": "cancelled", "deleted": "NotFoundError",
}  # fmt: skip


def judged(seen: dict[str, Any]) -> None:
    seen["text"] = seen["text"].split()[0]
    assert seen == EXPECTED


def test_python_sdk_2_does_all_of_it(stack: Stack) -> None:
    script = Path(__file__).with_name("background_older_sdk.py")
    done = subprocess.run(
        [program("python"), str(script)], env={"BASE_URL": stack.url, "MODEL": MODEL},
        capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    judged(orjson.loads(done.stdout))


def test_the_javascript_sdk_does_all_of_it(stack: Stack, tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    judged(run_node(
        "background.mjs", tmp_path, BASE_URL=stack.url, MODEL=MODEL, ANSWERS=str(answers)
    ))  # fmt: skip
    assert judge_recorded(answers) >= 7
