"""A program that knows only Celery and the broker's URL, against the real engine."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult
from kit.stacks.real_stack import Stack, asked, frozen, listed_questions, text_of

from contract.redis import keys
from demo.stack import Worker, eventually

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("worker")]


def send(stack: Stack, body: dict[str, Any], **options: Any) -> AsyncResult:
    """Send a request as any Celery client would."""
    return stack.app.send_task("warmq.generate", args=[body], queue="warmq", **options)


def ask(stack: Stack, body: dict[str, Any]) -> dict[str, Any]:
    """Return the response body to a request."""
    answer: dict[str, Any] = send(stack, body).get(timeout=60)
    return answer


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completion"])
def test_both_forms_are_answered_truly(stack: Stack, chat: bool) -> None:
    questions = listed_questions(30, seed=11)
    sent = [send(stack, asked(q, chat)) for q in questions]
    answers = [result.get(timeout=60) for result in sent]
    assert [text_of(answer) for answer in answers] == [q.answer for q in questions]
    assert {answer["object"] for answer in answers} == {
        "chat.completion" if chat else "text_completion"
    }


def test_the_stop_tokens_come_from_the_model(stack: Stack) -> None:
    """Nobody names <|eot_id|>: it is in the model's generation config."""
    (question,) = listed_questions(1, seed=12)
    answer = ask(stack, asked(question, True, max_tokens=200))
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert text_of(answer) == question.answer


def test_task_id_priority_and_expires_are_honoured(stack: Stack, worker: Worker) -> None:
    (question,) = listed_questions(1, seed=13)
    in_flight = stack.stats()["in_flight_limit"]
    # Given a full engine, and twice as much behind it
    with frozen(worker):
        busy = [send(stack, asked(question, True, ignore_eos=True, max_tokens=400), priority=3)
                for _ in range(3 * in_flight)]  # fmt: skip
    eventually(lambda: stack.client.zcard(keys.LEASES) == in_flight, 20, "the engine is full")
    # When an urgent request comes, and one that waits for longer than it may
    with frozen(worker):
        already = sum(result.ready() for result in busy)  # 0, unless this process was held up
        late = send(stack, asked(question, True), priority=9, expires=0.5)
        too_late = time.monotonic() + 0.7
        urgent = send(stack, asked(question, True), priority=0, task_id="urgent-1")
        eventually(lambda: time.monotonic() > too_late, 5, "the deadline has passed")
    # Then the one overtakes, and the other ends as expired
    assert text_of(urgent.get(timeout=60)) == question.answer
    assert AsyncResult("urgent-1", app=stack.app).state == "SUCCESS"
    stack.app.control.revoke([result.id for result in busy])
    with pytest.raises(TaskRevokedError, match="deadline"):
        late.get(timeout=60)
    for result in busy:
        result.get(timeout=30, propagate=False)
    # By the worker's clock: this client may hear of the one after the others have ended.
    assert sum(result.date_done < urgent.date_done for result in busy) <= already + in_flight
    # A client hears of a result a moment before the worker hears that it is stored.
    eventually(lambda: stack.in_flight() == 0, 20, "nothing is in flight")


def test_inspect_tells_the_truth_about_the_engine(stack: Stack) -> None:
    stats = stack.stats()
    assert (stats["state"], stats["engine"]) == ("ready", "vllm")
    assert (stats["max_num_seqs"], stats["max_model_len"]) == (32, 1024)
    assert stats["model"].endswith("models/tiny")
    assert stats["details"]["device"] == "cpu"


# -- parameters reach vLLM -------------------------------------------------------------------


def test_several_choices_with_seeds_are_repeatable(stack: Stack) -> None:
    body = {"prompt": "Question: What", "n": 2, "seed": 7, "temperature": 1.5, "max_tokens": 12,
            "ignore_eos": True}  # fmt: skip
    first, again = ask(stack, body), ask(stack, body)
    other = ask(stack, body | {"seed": 8})
    texts = [text_of(first, n) for n in (0, 1)]
    assert [choice["index"] for choice in first["choices"]] == [0, 1]
    assert texts[0] != texts[1]
    assert [text_of(again, n) for n in (0, 1)] == texts
    assert [text_of(other, n) for n in (0, 1)] != texts
    assert first["usage"]["completion_tokens"] == 24


def test_stop_texts_end_an_answer_before_them(stack: Stack) -> None:
    (question,) = [q for q in listed_questions(400, seed=14) if q.answer == "42"][:1]
    answer = ask(stack, asked(question, True, stop=["2"]))
    assert text_of(answer) == "4"
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_logprobs_are_given_and_sum_up(stack: Stack) -> None:
    (question,) = listed_questions(1, seed=15)
    chat = ask(stack, asked(question, True, logprobs=True, top_logprobs=3))
    tokens = chat["choices"][0]["logprobs"]["content"]
    assert len(tokens[0]["top_logprobs"]) == 3
    assert math.exp(tokens[0]["logprob"]) > 0.5
    text = ask(stack, asked(question, False, logprobs=2, echo=False))
    assert len(text["choices"][0]["logprobs"]["tokens"]) == text["usage"]["completion_tokens"]


def test_logit_bias_changes_the_answer(stack: Stack) -> None:
    (question,) = listed_questions(1, seed=16)
    plain = ask(stack, asked(question, True, logprobs=True, return_token_ids=True))
    first = plain["choices"][0]["token_ids"][0]
    biased = ask(stack, asked(question, True, logit_bias={str(first): -100}, return_token_ids=True))
    assert biased["choices"][0]["token_ids"][0] != first
    assert text_of(biased) != question.answer


def test_structured_output_keeps_to_its_schema(stack: Stack) -> None:
    # No white space is possible in it, of which a tiny model might never come to an end.
    schema = {"enum": ["warm", "queue"]}
    (question,) = listed_questions(1, seed=17)
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    for chat in (True, False):
        answer = ask(stack, asked(question, chat, max_tokens=30, response_format=form))
        assert json.loads(text_of(answer)) in schema["enum"]


def test_a_choice_is_kept_to(stack: Stack) -> None:
    (question,) = listed_questions(1, seed=18)
    answer = ask(stack, asked(question, False, structured_outputs={"choice": ["yes", "no"]}))
    assert text_of(answer) in ("yes", "no")


def test_min_tokens_and_penalties_reach_the_engine(stack: Stack) -> None:
    (question,) = listed_questions(1, seed=19)
    answer = ask(stack, asked(question, True, min_tokens=10, max_tokens=12, top_k=5, top_p=0.9,
                              presence_penalty=0.5, frequency_penalty=0.5,
                              repetition_penalty=1.1))  # fmt: skip
    assert answer["usage"]["completion_tokens"] >= 10


def test_a_token_prompt_is_taken_as_it_is(stack: Stack) -> None:
    answer = ask(stack, {"prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True})
    assert answer["usage"] == answer["usage"] | {"prompt_tokens": 3, "completion_tokens": 3}


@pytest.mark.parametrize("limit", [None, 100])
def test_a_prompt_is_cut_to_what_its_answer_leaves(stack: Stack, limit: int | None) -> None:
    """Without a limit of its own an answer has the default one, and at most half the context."""
    body = {"prompt": [5] * 1100, "truncate_prompt_tokens": -1, "ignore_eos": True}
    usage = ask(stack, body | ({"max_tokens": limit} if limit else {}))["usage"]
    assert usage["prompt_tokens"] == 1024 - (limit or 512)
    assert usage["total_tokens"] == 1024


@pytest.mark.parametrize(
    ("fields", "kind", "part"),
    [
        ({"max_token": 5}, "RequestRejected", "max_token: unknown to /v1/chat/completions"),
        ({"temperature": 9}, "RequestRejected", "temperature"),
        ({"max_tokens": -5}, "RequestRejected", "max_tokens"),
        ({"stream": True}, "RequestRejected", "cannot stream"),
        ({"logit_bias": {"999999": 1.0}}, "RequestRejected", "999999"),
        ({"messages": [{"role": "user", "content": "word " * 3000}]}, "RequestRejected", "1024"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema":
          {"type": "no such type"}}}}, "RequestRejected", ""),
    ],
    ids=["unknown", "range", "limit", "stream", "token", "too long", "schema"],
)  # fmt: skip
def test_what_is_wrong_fails_alone_and_says_why(
    stack: Stack, fields: dict[str, Any], kind: str, part: str
) -> None:
    (question,) = listed_questions(1, seed=20)
    bad = send(stack, asked(question, True, **fields))
    good = send(stack, asked(question, True))
    with pytest.raises(Exception) as caught:
        bad.get(timeout=30)
    assert type(caught.value).__name__ == kind
    assert part in str(caught.value)
    assert text_of(good.get(timeout=30)) == question.answer
