"""What a gateway does: requests of no batch, their texts on a channel, and vLLM's other urls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kit.protocol.lessee import celery_message, stored
from kit.stacks.real_stack import Stack, asked, listed_questions, read_jsonl, text_of, write_jsonl

from contract import naming
from contract.openai.body import (
    CHAT_URL,
    COMPLETION_URL,
    COUNT_TOKENS_URL,
    MESSAGES_URL,
    RESPONSES_URL,
    TOKENIZE_URL,
)
from contract.streaming import Piece, decode_pieces, texts_of
from demo.stack import Worker, eventually

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("worker")]
LONG = {"max_tokens": 900, "ignore_eos": True, "seed": 7}
SAY = "What is 2 + 3?"
MESSAGE = [{"role": "user", "content": SAY}]
#: By name: url, body, and how many texts the answer has.
FORMS: dict[str, tuple[str, dict[str, Any], int]] = {
    "chat": (CHAT_URL, {"messages": MESSAGE, "n": 2, **LONG}, 2),
    "completion": (COMPLETION_URL, {"prompt": ["2 + 3 =", "a b"], "n": 2, **LONG}, 4),
    # Several choices: a slow machine reads one only when all of it is written.
    "stop text": (
        COMPLETION_URL,
        {"prompt": "2 + 3 =", "stop": ["no text has this"], "n": 8, **LONG},
        8,
    ),
    "token ids": (COMPLETION_URL, {"prompt": [5, 6, 7], **LONG}, 1),
    "message": (MESSAGES_URL, {"messages": MESSAGE, "max_tokens": 300}, 1),
    "response": (RESPONSES_URL, {"input": SAY, "max_output_tokens": 900, "ignore_eos": True}, 1),
}


def ask(stack: Stack, request_id: str, url: str, body: dict[str, Any], listener: str = "") -> None:
    """Queue a request as a gateway does."""
    ours = {"url": url} | ({"listener": listener} if listener else {})
    stack.client.lpush("warmq", celery_message(request_id, body, warmq=ours))


def answer(stack: Stack, request_id: str) -> dict[str, Any]:
    """Return the stored result of a request, once there is one."""
    found: dict[str, Any] = eventually(lambda: stored(stack.client, request_id), 60, request_id)
    return found


@pytest.mark.parametrize("form", FORMS)
def test_the_text_comes_on_the_listeners_channel_and_is_the_results(
    stack: Stack, form: str
) -> None:
    url, body, choices = FORMS[form]
    listener, request_id = "gateway-1", f"online-{form}"
    with stack.client.pubsub(ignore_subscribe_messages=True) as pubsub:
        pubsub.subscribe(naming.text_channel(listener), naming.RESULT_PREFIX + request_id)
        pubsub.get_message(timeout=5)
        ask(stack, request_id, url, body, listener)
        pieces: list[Piece] = []
        while (message := pubsub.get_message(timeout=60)) is None or not message[
            "channel"
        ].startswith(naming.RESULT_PREFIX.encode()):
            pieces += decode_pieces(message["data"]) if message else []
    result = texts_of(answer(stack, request_id)["result"])
    assert len(result) == choices
    texts: dict[int, str] = {}
    for piece in pieces:
        assert (piece.request_id, piece.attempt) == (request_id, 1)
        assert piece.at == len(texts.get(piece.choice, ""))  # no gap, and nothing twice
        texts[piece.choice] = texts.get(piece.choice, "") + piece.text
    assert texts.keys() <= result.keys()
    assert all(result[choice].startswith(text) for choice, text in texts.items())
    # Of a short answer, or where the disk holds Redis up, little may come before the result.
    assert texts or form == "message"


def test_a_message_and_a_response_say_what_a_chat_says(stack: Stack) -> None:
    for n, question in enumerate(listed_questions(8, seed=31)):
        messages = asked(question, True)["messages"]
        short = {"temperature": 0, "model": "tiny"}
        ask(stack, f"m{n}", MESSAGES_URL, {"messages": messages, "max_tokens": 16, **short})
        ask(stack, f"r{n}", RESPONSES_URL, {"input": messages, "max_output_tokens": 16, **short})
        message, response = answer(stack, f"m{n}")["result"], answer(stack, f"r{n}")["result"]
        assert texts_of(message)[0].strip() == texts_of(response)[0].strip() == question.answer
        assert (message["id"], message["model"]) == (f"chatcmpl-m{n}", "tiny")
        assert message["stop_reason"] == "end_turn"
        assert (response["id"], response["status"]) == (f"resp_r{n}", "completed")
        assert min(m["usage"]["input_tokens"] for m in (message, response)) > 5


def test_tokens_are_counted_as_the_model_counts_them(stack: Stack) -> None:
    (question,) = listed_questions(1, seed=32)
    chat = asked(question, True)
    ask(stack, "t1", TOKENIZE_URL, {"messages": chat["messages"], "return_token_strs": True})
    ask(stack, "t2", COUNT_TOKENS_URL, {"messages": chat["messages"]})
    ask(stack, "t3", CHAT_URL, chat)
    ask(stack, "t4", TOKENIZE_URL, {"prompt": "2 + 3"})
    tokens = answer(stack, "t1")["result"]
    asked_for = answer(stack, "t3")["result"]["usage"]["prompt_tokens"]
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"]) == asked_for
    assert answer(stack, "t2")["result"]["input_tokens"] == asked_for
    assert 0 < answer(stack, "t4")["result"]["count"] < asked_for


#: By name: url, body, the error's code, and words of it.
REFUSED = {
    "stored": (RESPONSES_URL, {"input": "x", "store": True}, "invalid_request", "store"),
    "continued": (RESPONSES_URL, {"input": "x", "previous_response_id": "resp_1"},
                  "invalid_request", "give all of it in `input`"),
    "in the background": (RESPONSES_URL, {"input": "x", "background": True}, "invalid_request",
                          "answered once"),
    "streamed": (MESSAGES_URL, {"messages": MESSAGE, "max_tokens": 5, "stream": True},
                 "invalid_request", "stream"),
    "without a limit": (MESSAGES_URL, {"messages": MESSAGE}, "invalid_request", "max_tokens"),
    "too long a message": (MESSAGES_URL, {"messages": MESSAGE, "max_tokens": 5000},
                           "context_length_exceeded", "max_tokens"),
    "too long a response": (RESPONSES_URL, {"input": "word " * 5000}, "context_length_exceeded",
                            "context length"),
    "tools no parser reads": (RESPONSES_URL, {"input": "x", "tools": [{"type": "nonsense"}]},
                              "invalid_request", "tools"),
    "text and chat": (TOKENIZE_URL, {"prompt": "x", "messages": MESSAGE}, "invalid_request",
                      "not both"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_answered_is_refused_in_words(stack: Stack, what: str) -> None:
    url, body, code, words = REFUSED[what]
    request_id = f"refused {what}"
    ask(stack, request_id, url, body)
    error = answer(stack, request_id)["warmq"]["error"]
    assert error["code"] == code, error
    assert words in error["message"]


def test_lines_of_all_urls_go_through_one_batch_and_their_tokens_are_counted(
    stack: Stack, tmp_path: Path
) -> None:
    (question,) = listed_questions(1, seed=33)
    messages = asked(question, True)["messages"]
    bodies = {
        MESSAGES_URL: {"messages": messages, "max_tokens": 16, "temperature": 0},
        RESPONSES_URL: {"input": messages, "max_output_tokens": 16, "temperature": 0},
        COUNT_TOKENS_URL: {"messages": messages},
        TOKENIZE_URL: {"messages": messages},
        CHAT_URL: asked(question, True),
    }
    lines = [{"custom_id": url, "method": "POST", "url": url, "body": body}
             for url, body in bodies.items()]  # fmt: skip
    source, out = write_jsonl(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    run = stack.producer("submit", source, "--batch-id", "all-urls", "--wait", "-o", out)
    assert run.returncode == 0, run.stderr
    found = {line["custom_id"]: line["response"]["body"] for line in read_jsonl(out)}
    assert texts_of(found[MESSAGES_URL])[0].strip() == question.answer
    assert texts_of(found[RESPONSES_URL])[0].strip() == text_of(found[CHAT_URL])
    used = [found[url]["usage"]["input_tokens"] for url in (MESSAGES_URL, RESPONSES_URL)]
    used.append(found[CHAT_URL]["usage"]["prompt_tokens"])
    assert stack.batch("all-urls").number("prompt_tokens") == sum(used)


def test_the_worker_says_which_urls_it_serves(stack: Stack, worker: Worker) -> None:
    assert worker.process is not None
    served = json.dumps(stack.stats())
    assert all(url in served for url in (MESSAGES_URL, RESPONSES_URL, TOKENIZE_URL))
