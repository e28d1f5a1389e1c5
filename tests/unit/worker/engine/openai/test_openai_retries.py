"""The openai engine's table, and answers put together from streams."""

from __future__ import annotations

import re
import time
from email.utils import formatdate
from typing import Any

import orjson
import pytest

from contract.openai.body import CHAT_URL, COMPLETION_URL
from contract.settings import SettingsError
from demo.stack import ROOT
from worker.engine.catalogue import load_settings
from worker.engine.openai import OpenAISettings
from worker.engine.openai.metrics import Metrics, allowed_to_wait, next_limit, read_metrics
from worker.engine.openai.reassembly import Reassembly, streamable
from worker.engine.openai.retries import (
    LONGEST_RETRY_AFTER_S,
    TABLE,
    Action,
    Condition,
    Unanswered,
    read_error,
    seconds_of,
)
from worker.engine.remote.servers import Health

PAGE = ROOT / "docs/reference/engine-openai.md"


@pytest.mark.parametrize(
    ("what", "action"),
    [
        (400, Action.DOUBT), (404, Action.DOUBT), (413, Action.DOUBT), (501, Action.DOUBT),
        (401, Action.DOUBT), (403, Action.DOUBT), (407, Action.DOUBT),
        (429, Action.WAIT), (408, Action.WAIT), (402, Action.WAIT), (529, Action.WAIT),
        (500, Action.PROBE), (502, Action.PROBE), (503, Action.PROBE), (524, Action.PROBE),
        (302, Action.DOUBT), (307, Action.DOUBT), (200, Action.DOUBT),
        (Condition.CONNECT, Action.MOVE), (Condition.LOST, Action.PROBE),
        (Condition.STALLED, Action.PROBE), (Condition.ENDED, Action.MOVE),
        (Condition.GARBLED, Action.DOUBT),
    ],
)  # fmt: skip
def test_each_way_not_to_answer_has_its_row(what: int | Condition, action: Action) -> None:
    assert Unanswered(what, "").action() is action


@pytest.mark.parametrize("status", [400, 413, 415, 422, 501])
def test_a_refusal_in_words_is_the_requests_own(status: int) -> None:
    for body in (b'{"error": {"message": "no"}}', b'{"detail": "no"}', b'{"error": "no"}'):
        assert read_error(status, body).action() is Action.REJECT
    kong = b'{"message": "no Route matched with those values"}'
    assert read_error(status, kong).action() is Action.DOUBT


@pytest.mark.parametrize("status", [404, 405, 410, 418, 421, 424])
def test_other_refusals_are_believed_when_others_are_answered(status: int) -> None:
    assert read_error(status, b'{"error": {"message": "no", "code": 1}}').action() is Action.DOUBT


@pytest.mark.parametrize(
    "error",
    [
        {"message": "API key not valid. Please pass a valid API key."},
        {"message": "no", "type": "authentication_error"},
        {"message": "Your account has been deactivated"},
    ],
)
def test_words_about_the_key_are_not_the_requests_own(error: dict[str, str]) -> None:
    assert read_error(400, orjson.dumps({"error": error})).action() is Action.DOUBT


@pytest.mark.parametrize("status", [200, 400, 403, 500])
@pytest.mark.parametrize(
    "error",
    [
        {"message": "Rate limit exceeded: free-models-per-min"},
        {"message": "ThrottlingException: Too many requests, please wait"},
        {"message": "You exceeded your current quota", "type": "insufficient_quota"},
        {"message": "wait", "type": "rate_limit_error"},
        {"message": "wait", "code": "rate_limit_exceeded"},
        {"message": "Overloaded", "type": "overloaded_error"},
        {"message": "Insufficient Balance"},
        {"message": "Your credit balance is too low to access the API"},
        {"message": "Billing hard limit has been reached", "param": "None"},
        {"message": "You have run out of credits"},
        {"message": "Payment Required"},
        {"message": "Limit 3 RPM reached"},
        {"message": "Too many concurrent requests"},
        {"message": "litellm.APIError: No deployments available for selected model"},
    ],
)
def test_words_of_a_limit_are_waited_for_under_any_status(
    status: int, error: dict[str, str]
) -> None:
    assert read_error(status, orjson.dumps({"error": error})).action() is Action.WAIT
    named = orjson.dumps({"error": error | {"param": "messages"}})
    assert read_error(status, named).action() is not Action.WAIT, "it is about a field"


def test_one_request_larger_than_the_limit_is_refused() -> None:
    text = "Request too large for gpt-4 on tokens per min (TPM): Limit 10000, Requested 12000"
    fault = read_error(429, orjson.dumps({"error": {"message": text}}))
    assert (fault.action(), fault.rejection().message) == (Action.REJECT, text)
    groq = {"message": text, "type": "tokens", "code": "rate_limit_exceeded"}
    assert read_error(413, orjson.dumps({"error": groq})).action() is Action.REJECT


def test_a_503_that_names_a_time_is_waited_for() -> None:
    assert Unanswered(503, "", wait_s=0.0).action() is Action.WAIT


@pytest.mark.parametrize(
    ("health", "what", "inside", "action"),
    [
        (Health.WELL, Condition.LOST, True, Action.DOUBT),
        (Health.WELL, 500, False, Action.DOUBT),
        (Health.WELL, 503, False, Action.WAIT),
        (Health.ILL, 503, False, Action.MOVE),
        (Health.ILL, 500, True, Action.DIED),
        (Health.ILL, Condition.LOST, True, Action.DIED),
        (Health.ILL, Condition.LOST, False, Action.MOVE),
        (Health.SILENT, Condition.LOST, True, Action.MOVE),
        (Health.WELL, Condition.STALLED, True, Action.DOUBT),
        (Health.SILENT, Condition.STALLED, True, Action.MOVE),
    ],
)
def test_only_what_was_inside_a_server_that_is_ill_may_have_brought_it_down(
    health: Health, what: int | Condition, inside: bool, action: Action
) -> None:
    assert Unanswered(what, "", inside=inside).after_probe(health) is action


def test_the_page_has_the_table_of_the_code() -> None:
    page = PAGE.read_text()
    for happened, _, action in TABLE:
        # A row of the page may have several faults of one action.
        rows = [line for line in page.splitlines() if line.endswith(f" | {action} |")]
        assert any(happened in re.split(r"<br>|^\| | \| ", row) for row in rows), happened


def test_every_field_that_stops_streaming_is_on_the_page() -> None:
    from worker.engine.openai.reassembly import UNSTREAMED

    page = PAGE.read_text()
    assert not [name for name in UNSTREAMED if f"`{name}`" not in page]


def test_retry_after_is_read_in_both_its_forms() -> None:
    assert seconds_of("7") == 7
    assert seconds_of("99999999") == LONGEST_RETRY_AFTER_S
    assert 50 < (seconds_of(formatdate(time.time() + 60, usegmt=True)) or 0) <= 60
    assert seconds_of(formatdate(0, usegmt=True)) == 0
    for nothing in (None, "", "soon", "-1"):
        assert seconds_of(nothing) is None


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b'{"error": {"message": "no", "param": "n", "code": 400}}', "no"),
        (b'{"error": "no"}', "no"),
        (b'{"detail": "no"}', "no"),
        (b'[{"error": {"message": "no", "code": 400}}]', "no"),
        (b"<html><head><title>no</title></head><h1>ignored</h1></html>", "status 400: no"),
        (b"<html><style>p {}</style><p>no <b>way</b></html>", "status 400: no way"),
        (b"400 no\n", "400 no"),
        (b'{"message": "no"}', "status 400: no"),
        (b"[1]", "status 400: [1]"),
        (b"", "status 400"),
        (b"\xff", "status 400: \ufffd"),
    ],
)
def test_an_error_is_read_in_whatever_form_it_comes(raw: bytes, message: str) -> None:
    assert read_error(400, raw).message == message


def test_a_redirect_is_told_without_what_may_be_secret() -> None:
    fault = read_error(307, b"", location="https://me:pw@login.example/v1/chat?token=s3cret")
    assert fault.message == "status 307: redirects to login.example/v1/chat"


def test_a_prompt_that_is_too_long_is_told_by_its_code() -> None:
    for text in (
        "This model's maximum context length is 1024 tokens.",
        "max_tokens=5000 cannot be greater than max_model_len=1024",
    ):
        fault = read_error(400, orjson.dumps({"error": {"message": text}}))
        assert fault.rejection().code == "context_length_exceeded"
    assert read_error(404, b'{"detail": "no model x"}').rejection().code == "model_not_found"


# -- answers ------------------------------------------------------------------------------------


def assembled(url: str, chunks: list[dict[str, Any]], **request: Any) -> dict[str, Any]:
    whole = Reassembly(url, request, vllm=False)
    for chunk in chunks:
        whole.add(chunk)
    assert ends(whole)
    assert all(ends(whole))
    return whole.body()


def ends(whole: Reassembly) -> list[str | None]:
    return [choice.get("finish_reason") for choice in whole.choices]


def delta(index: int = 0, end: str | None = None, **delta: Any) -> dict[str, Any]:
    return {
        "id": "x", "object": "chat.completion.chunk", "model": "m",
        "choices": [{"index": index, "delta": delta, "finish_reason": end}],
    }  # fmt: skip


def test_choices_that_come_mixed_are_each_whole_and_in_order() -> None:
    body = assembled(CHAT_URL, [
        delta(1, role="assistant", content=""), delta(0, role="assistant", content=""),
        delta(1, content="b"), delta(0, content="a"), delta(1, content="b", end="length"),
        delta(0, content="", end="stop"),
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 3}},
    ])  # fmt: skip
    assert body["object"] == "chat.completion"
    assert body["usage"]["prompt_tokens"] == 3
    assert [c["message"] for c in body["choices"]] == [
        {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "bb"},
    ]  # fmt: skip
    assert [c["finish_reason"] for c in body["choices"]] == ["stop", "length"]


def test_tool_calls_are_put_together_by_their_index() -> None:
    def call(index: int, arguments: str, **more: Any) -> dict[str, Any]:
        name = more.pop("name", None)
        function = {"arguments": arguments} | ({"name": name} if name else {})
        return {"index": index, "function": function, **more}

    body = assembled(CHAT_URL, [
        delta(role="assistant", content=""),
        delta(tool_calls=[call(0, "", id="c0", type="function", name="add")]),
        delta(tool_calls=[call(0, '{"a"')]),
        delta(tool_calls=[call(1, "{}", id="c1", type="function", name="now")]),
        delta(tool_calls=[call(0, ": 1}")], end="tool_calls"),
    ])  # fmt: skip
    message = body["choices"][0]["message"]
    assert message["content"] is None
    assert message["tool_calls"] == [
        {"id": "c0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
        {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}},
    ]


def test_reasoning_and_logprobs_are_joined() -> None:
    chunks = [delta(role="assistant", content=""), delta(reasoning="so"), delta(reasoning=" on")]
    chunks += [delta(content="x", end="stop")]
    for chunk, token in zip(chunks[1:], "abc", strict=True):
        chunk["choices"][0]["logprobs"] = {"content": [{"token": token}]}
    choice = assembled(CHAT_URL, chunks)["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "x", "reasoning": "so on"}
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["a", "b", "c"]


def test_text_offsets_count_tokens_as_whole_answers_do() -> None:
    def piece(text: str, offset: int, end: str | None = None) -> dict[str, Any]:
        logprobs = {"tokens": [text or "</s>"], "text_offset": [offset], "token_logprobs": [-1.0]}
        choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": end}
        return {"object": "text_completion", "choices": [choice]}

    body = assembled(COMPLETION_URL, [piece("ab", 0), piece("", 2), piece("c", 2, "stop")])
    choice = body["choices"][0]
    assert choice["text"] == "abc"
    assert choice["logprobs"]["text_offset"] == [0, 2, 6]


def test_an_answer_without_its_end_is_not_finished() -> None:
    whole = Reassembly(CHAT_URL, {}, vllm=False)
    assert ends(whole) == []
    whole.add(delta(0, content="a", end="stop"))
    whole.add(delta(1, content="b"))
    assert ends(whole) == ["stop", None]
    whole.add(delta(1, end="abort"))
    assert ends(whole) == ["stop", "abort"]


def test_what_a_stream_does_not_carry_is_asked_for_at_once() -> None:
    assert streamable({"messages": [], "logprobs": True, "tools": [], "echo": False, "n": 3})
    assert not streamable({"prompt": "x", "prompt_logprobs": 0})
    assert not streamable({"messages": [], "tools": [{}]})
    assert not streamable({"messages": [], "logprobs": True, "top_logprobs": None})


# -- limits and settings --------------------------------------------------------------------------


def test_metrics_are_summed_over_replicas_and_strange_pages_do_no_harm() -> None:
    page = b"""# HELP vllm:num_requests_running x
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0"} 1e+02
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.5
vllm:generation_tokens_total{engine="0"} 7.0
"""
    assert read_metrics(page) == Metrics(7, 100, 0.5, 7)
    for strange in (b"", b"\xff", b"vllm:num_requests_running 1.2.3\n", b"<html>"):
        assert read_metrics(strange) is None


def settle(slots: int, rounds: int = 40) -> list[int]:
    """Return the limits of a server with so many slots and a client that fills each limit."""
    limits, peak = [32], 0.0
    for _ in range(rounds):
        limit = limits[-1]
        metrics = Metrics(min(limit, slots), max(0, limit - slots), 0.5, 0)
        peak = max(metrics.running, 0.99 * peak)
        limits.append(next_limit(limit, limit, metrics, peak))
    return limits


@pytest.mark.parametrize("slots", [1, 8, 32, 100, 160])
def test_the_limit_settles_a_little_above_the_slots(slots: int) -> None:
    limits = settle(slots)
    assert len(set(limits[-5:])) == 1
    assert slots < limits[-1] <= slots + allowed_to_wait(slots)


def test_a_wave_of_requests_that_begin_together_does_not_lower_the_limit() -> None:
    # All 32 have just ended, what was sent for them waits: few run, many wait
    assert next_limit(48, 48, Metrics(2, 46, 0.1, 0), 32.0) == 48


def test_the_limit_falls_by_what_waits_too_much_and_other_clients_requests_count() -> None:
    assert next_limit(64, 64, Metrics(32, 36, 0.5, 0), 32.0) == 44
    assert next_limit(40, 40, Metrics(32, 200, 0.5, 0), 32.0) == 1
    assert next_limit(40, 10, Metrics(32, 200, 0.5, 0), 32.0) == 40  # all are others'


def test_the_limit_stays_when_it_is_not_filled_or_the_cache_is_full() -> None:
    assert next_limit(32, 10, Metrics(10, 0, 0.1, 0), 10) == 32
    assert next_limit(32, 32, Metrics(32, 0, 0.97, 0), 32) == 32
    assert next_limit(250, 250, Metrics(250, 0, 0.1, 0), 250) == 256
    assert next_limit(32, 32, None, 0) == 36


@pytest.mark.parametrize("urls", ["", "localhost:8000", "http://", "http://u:s3cret@host/v1"])
def test_wrong_base_urls_are_refused_without_being_quoted(
    monkeypatch: pytest.MonkeyPatch, urls: str
) -> None:
    monkeypatch.setenv("WARMQ_ENGINE", "openai")
    monkeypatch.setenv("WARMQ_OPENAI_BASE_URLS", urls)
    with pytest.raises(SettingsError, match="WARMQ_OPENAI_BASE_URLS: name") as caught:
        load_settings()
    assert "s3cret" not in str(caught.value)


def test_a_url_of_one_endpoint_is_refused_by_name() -> None:
    urls = "http://a/v1,http://b/v1/chat/completions/"
    with pytest.raises(ValueError, match="http://b/v1/chat/completions is one endpoint"):
        OpenAISettings(engine="openai", openai_base_urls=urls)


def test_the_key_is_in_no_repr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMQ_OPENAI_API_KEY", "s3cret")
    settings = OpenAISettings(engine="openai", openai_base_urls="http://a/v1/, http://b:1/v1")
    assert settings.base_urls == ["http://a/v1", "http://b:1/v1"]
    assert "s3cret" not in repr(settings)
    assert not re.search("s3cret", str(settings.model_dump()))
