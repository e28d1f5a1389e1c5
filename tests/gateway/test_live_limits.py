"""Online requests that wait too long, find no worker or a full queue, or are asked twice."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from kit.gateways.gateway_process import GatewayProcess
from kit.gateways.live_stack import HELLO, MODEL, Stack

from contract.naming import RESULT_PREFIX
from demo.stack import eventually


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("limits"), gateway_online_timeout_s=1.5) as made:
        yield made


def test_a_request_that_takes_too_long_is_given_up_and_frees_its_slot(stack: Stack) -> None:
    began = time.monotonic()
    with pytest.raises(openai.InternalServerError) as caught:
        stack.client.chat.completions.create(model=MODEL, messages=HELLO, user="simulate:sleep=50")
    assert 1.4 < time.monotonic() - began < 20
    assert (caught.value.status_code, caught.value.code) == (503, "request_timeout")
    assert caught.value.response.headers["retry-after"] == "5"
    eventually(lambda: stack.running() == 0, 20, "the slot is free")


def test_a_stream_may_take_longer(stack: Stack) -> None:
    stream = stack.client.chat.completions.create(
        model=MODEL, messages=HELLO, user="simulate:sleep=3", stream=True
    )
    assert stack.said(stream) == stack.text_of("Hello")


def test_results_of_online_requests_are_kept_for_minutes_alone(stack: Stack) -> None:
    stack.client.chat.completions.create(model=MODEL, messages=HELLO)
    redis = stack.store._client
    for key in redis.scan_iter(RESULT_PREFIX + "*"):
        assert 0 < redis.pttl(key) <= 120_000


def test_without_a_worker_the_answer_is_to_come_back(tmp_path: Path) -> None:
    with Stack(tmp_path, worker=False) as stack:
        with pytest.raises(openai.InternalServerError) as caught:
            stack.client.chat.completions.create(model=MODEL, messages=HELLO)
        assert (caught.value.status_code, caught.value.code) == (503, "no_worker")
        headers = caught.value.response.headers
        assert (headers["x-should-retry"], headers["retry-after"]) == ("true", "5")
        assert stack.client.models.list().data == []


def test_a_full_queue_takes_no_more(tmp_path: Path) -> None:
    settings = {"gateway_models": MODEL, "high_water_requests": 1}
    with Stack(tmp_path, worker=False, **settings) as stack, stack.begin("none"):
        eventually(lambda: stack.waiting() == 1, 10, "one waits")
        with pytest.raises(openai.InternalServerError) as caught:
            stack.client.chat.completions.create(model=MODEL, messages=HELLO)
        assert (caught.value.status_code, caught.value.code) == (503, "queue_full")
        assert "the queue is full" in caught.value.message


def test_a_gateway_without_redis_answers_503_until_it_is_back(tmp_path: Path) -> None:
    with Stack(tmp_path) as stack:
        stack.client.chat.completions.create(model=MODEL, messages=HELLO)
        stack.redis.stop()
        with pytest.raises(openai.InternalServerError) as caught:
            stack.client.chat.completions.create(model=MODEL, messages=HELLO)
        assert caught.value.code == "store_unavailable"
        assert "redis" not in caught.value.message.lower()
        stack.redis.start()
        retrying = stack.client.with_options(max_retries=8)
        answer = retrying.chat.completions.create(model=MODEL, messages=HELLO)
        assert stack.said(answer) == stack.text_of("Hello")


@pytest.fixture(scope="module")
def keyed(stack: Stack) -> Iterator[str]:
    """Return the URL of a second gateway, whose requests may take longer."""
    with GatewayProcess(stack.redis.url, stack.folder) as gateway:
        yield f"{gateway.url}/v1/chat/completions"


def ask(url: str, key: str, timeout_s: float = 20, **fields: object) -> httpx.Response:
    body = {"model": MODEL, "messages": HELLO} | fields
    headers = {"idempotency-key": key} if key else {}
    return httpx.post(url, json=body, headers=headers, timeout=timeout_s)


def test_a_retry_after_a_lost_answer_computes_nothing_again(stack: Stack, keyed: str) -> None:
    started = stack.started()
    with pytest.raises(httpx.ReadTimeout):
        ask(keyed, "k1", 0.5, user="simulate:sleep=2")
    again = ask(keyed, "k1", user="simulate:sleep=2")
    third = ask(keyed, "k1", user="simulate:sleep=2")
    assert again.json() == third.json()
    assert again.status_code == 200
    assert stack.started() == started + 1


def test_a_retried_stream_goes_on_with_the_same_request(stack: Stack, keyed: str) -> None:
    started = stack.started()
    # Byte for byte what `ask` sends: a retry is known by its content.
    body = {"model": MODEL, "messages": HELLO, "user": "simulate:sleep=2", "stream": True}
    headers = {"idempotency-key": "k2"}
    with httpx.stream("POST", keyed, json=body, headers=headers) as first:
        assert b"data: " in next(first.iter_bytes())
    events = ask(keyed, "k2", user="simulate:sleep=2", stream=True).text
    assert '"content":"simulated "' in events
    assert events.endswith("data: [DONE]\n\n")
    assert stack.started() == started + 1


def test_a_failed_request_is_computed_again_at_a_retry(stack: Stack, keyed: str) -> None:
    started = stack.started()
    assert ask(keyed, "k3", user="simulate:fail").status_code == 503
    assert ask(keyed, "k3", user="simulate:fail").status_code == 503
    assert stack.started() == started + 2


def test_another_gateway_answers_the_retry_of_a_killed_gateways_request(
    stack: Stack, keyed: str
) -> None:
    started = stack.started()
    with GatewayProcess(stack.redis.url, stack.folder) as other, ThreadPoolExecutor(1) as pool:
        url = f"{other.url}/v1/chat/completions"
        first = pool.submit(ask, url, "k4", user="simulate:sleep=2")
        eventually(lambda: stack.started() == started + 1, 10, "it runs")
        other.kill()
        with pytest.raises(httpx.HTTPError):
            first.result()
    again = ask(keyed, "k4", user="simulate:sleep=2")
    assert again.status_code == 200, again.text
    assert stack.started() == started + 1


def test_two_who_ask_the_same_at_once_share_one_computation(stack: Stack, keyed: str) -> None:
    started = stack.started()
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: ask(keyed, "k5", user="simulate:sleep=1"), range(2)))
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].json() == answers[1].json()
    assert stack.started() == started + 1


def test_the_requests_of_a_killed_gateway_do_not_begin_long_after(tmp_path: Path) -> None:
    settings = {"gateway_models": MODEL, "gateway_online_timeout_s": 0.5}
    with Stack(tmp_path, worker=False, **settings) as stack:
        with stack.begin("none"):
            eventually(lambda: stack.waiting() == 1, 10, "one waits")
            stack.gateway.kill()
        (message,) = stack.messages()
        deadline = message["headers"]["warmq"]["deadline"]
        assert 0 < deadline - time.time() < 15


def test_a_gateway_that_is_stopped_frees_the_slots_of_its_requests(stack: Stack) -> None:
    with GatewayProcess(stack.redis.url, stack.folder) as gateway, ThreadPoolExecutor(2) as pool:
        url = f"{gateway.url}/v1/chat/completions"
        whole = pool.submit(ask, url, "", user="simulate:sleep=50")
        streamed = pool.submit(ask, url, "", user="simulate:sleep=50", stream=True)
        eventually(lambda: stack.running() == 2, 10, "they run")
        gateway.stop()
        eventually(lambda: stack.running() == 0, 20, "the slots are free")
        assert whole.result().status_code == 503
        assert whole.result().json()["error"]["code"] == "gateway_stops"
        assert '"code":"gateway_stops"' in streamed.result().text
        assert "Traceback" not in gateway.log_path.read_text()


@pytest.mark.parametrize(("drain_s", "takes_s"), [(0, 50), (1, 50), (30, 4)])
def test_a_gateway_that_is_stopped_waits_for_as_long_as_it_is_told(
    stack: Stack, drain_s: int, takes_s: int
) -> None:
    settings = {"drain_timeout_s": drain_s, "gateway_online_timeout_s": 60}
    with (
        GatewayProcess(stack.redis.url, stack.folder, **settings) as gateway,
        ThreadPoolExecutor(2) as pool,
    ):
        url, fate = f"{gateway.url}/v1/chat/completions", f"simulate:sleep={takes_s}"
        whole = pool.submit(ask, url, "", user=fate)
        streamed = pool.submit(ask, url, "", user=fate, stream=True)
        eventually(lambda: stack.running() == 2, 10, "they run")
        began = time.monotonic()
        assert gateway.stop() == 0
        if takes_s < drain_s:
            assert whole.result().status_code == 200
            assert streamed.result().text.endswith("data: [DONE]\n\n")
        else:
            assert drain_s <= time.monotonic() - began < drain_s + 8  # 10 s were the rule
            assert whole.result().json()["error"]["code"] == "gateway_stops"
            assert '"code":"gateway_stops"' in streamed.result().text
        eventually(lambda: stack.running() == 0, 20, "the slots are free")
