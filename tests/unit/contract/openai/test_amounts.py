"""Requests of more parts than an engine should be given are refused by name; large ones are not."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from contract.errors import RequestRejected
from contract.openai.amounts import (
    MAX_MESSAGES,
    MAX_OBJECTS,
    MAX_OPTION,
    MAX_PROMPTS,
    MAX_TOOLS,
    MAX_VALUES,
)
from contract.openai.body import (
    CHAT_URL,
    COMPLETION_URL,
    COUNT_TOKENS_URL,
    MESSAGES_URL,
    RESPONSES_URL,
    TOKENIZE_URL,
    min_body,
)
from contract.openai.lines import check_body, parse_line
from contract.openai.pooling import EMBEDDINGS_URL, RERANK_URLS, SCORE_URLS

Body = dict[str, Any]
PART = {"type": "text", "text": "x"}
MESSAGE = {"role": "user", "content": "x"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ENTRIES = f"above {MAX_MESSAGES}; give at most {MAX_MESSAGES} entries"
OBJECTS = f"more than {MAX_OBJECTS} objects (messages, parts, calls of tools); send fewer"
PROMPTS = f"prompts; give at most {MAX_PROMPTS}"
OPTION = f"bytes as JSON; give at most {MAX_OPTION}"


def said(parts: list[Any], **more: Any) -> Body:
    return {"messages": [{"role": "user", "content": parts} | more]}


def option(length: int) -> Body:
    return {"a": "x" * (length - len('{"a":""}'))}


#: By name: url, a body of so many parts, the most it may have, and what is said of one more.
BOUNDS: dict[str, tuple[str, Any, int, str]] = {
    "messages": (CHAT_URL, lambda n: {"messages": [MESSAGE] * n}, MAX_MESSAGES, ENTRIES),
    "messages of Anthropic": (
        MESSAGES_URL, lambda n: {"messages": [MESSAGE] * n, "max_tokens": 1}, MAX_MESSAGES, ENTRIES
    ),
    "messages to count": (
        COUNT_TOKENS_URL, lambda n: {"messages": [MESSAGE] * n}, MAX_MESSAGES, ENTRIES
    ),
    "messages to tokenize": (
        TOKENIZE_URL, lambda n: {"messages": [MESSAGE] * n}, MAX_MESSAGES, ENTRIES
    ),
    "messages to embed": (
        EMBEDDINGS_URL, lambda n: {"messages": [MESSAGE] * n}, MAX_MESSAGES, ENTRIES
    ),
    "entries of a response": (RESPONSES_URL, lambda n: {"input": [MESSAGE] * n}, MAX_MESSAGES,
                              ENTRIES),
    "parts": (CHAT_URL, lambda n: said([PART] * (n - 1)), MAX_OBJECTS, OBJECTS),
    "parts of two messages": (
        CHAT_URL,
        lambda n: {"messages": [said([PART] * 4000)["messages"][0],
                                said([PART] * (n - 4002))["messages"][0]]},
        MAX_OBJECTS, OBJECTS,
    ),
    "parts within a block": (
        MESSAGES_URL,
        lambda n: said([{"type": "tool_result", "content": [PART] * (n - 2)}]) | {"max_tokens": 1},
        MAX_OBJECTS, OBJECTS,
    ),
    "parts of a system text": (
        MESSAGES_URL,
        lambda n: {"system": [PART] * n, "messages": [MESSAGE], "max_tokens": 1},
        MAX_OBJECTS, OBJECTS,
    ),
    "parts of a response": (
        RESPONSES_URL, lambda n: {"input": [{"role": "user", "content": [PART] * (n - 1)}]},
        MAX_OBJECTS, OBJECTS,
    ),
    "parts to score": (
        SCORE_URLS[0], lambda n: {"text_1": "x", "text_2": {"content": [PART] * (n - 1)}},
        MAX_OBJECTS, OBJECTS,
    ),
    "calls of tools": (
        CHAT_URL, lambda n: said([PART], role="assistant", tool_calls=[CALL] * ((n - 2) // 2)),
        MAX_OBJECTS, OBJECTS,
    ),
    "values of an object": (
        MESSAGES_URL,
        lambda n: said([{"type": "tool_use", "input": {str(k): "" for k in range(n - 6)}}])
        | {"max_tokens": 1},
        MAX_VALUES, f"more than {MAX_VALUES} values",
    ),
    "tools": (CHAT_URL, lambda n: min_body(CHAT_URL) | {"tools": [{}] * n}, MAX_TOOLS,
              f"above {MAX_TOOLS}"),
    "documents of a chat": (
        CHAT_URL, lambda n: min_body(CHAT_URL) | {"documents": [{"text": "x"}] * n}, MAX_PROMPTS,
        f"above {MAX_PROMPTS}",
    ),
    "prompts": (COMPLETION_URL, lambda n: {"prompt": ["x"] * n}, MAX_PROMPTS, PROMPTS),
    "prompts of ids": (COMPLETION_URL, lambda n: {"prompt": [[1, 2]] * n}, MAX_PROMPTS, PROMPTS),
    "answers": (
        COMPLETION_URL, lambda n: {"prompt": ["x"] * (n // 128 + n % 128), "n": 128}, MAX_PROMPTS,
        f"answers; ask for at most {MAX_PROMPTS} in one request",
    ),
    "texts to embed": (EMBEDDINGS_URL, lambda n: {"input": ["x"] * n}, MAX_PROMPTS, PROMPTS),
    "documents": (RERANK_URLS[0], lambda n: {"query": "x", "documents": ["x"] * n}, MAX_PROMPTS,
                  f"above {MAX_PROMPTS}"),
    "texts to score": (SCORE_URLS[0], lambda n: {"text_1": ["x"] * n, "text_2": "x"}, MAX_PROMPTS,
                       f"above {MAX_PROMPTS}"),
    **{
        name: (CHAT_URL, lambda n, name=name: min_body(CHAT_URL) | {name: option(n)}, MAX_OPTION,
               f"body.{name}: has {MAX_OPTION + 9} {OPTION}")
        for name in ("chat_template_kwargs", "vllm_xargs", "mm_processor_kwargs",
                     "repetition_detection")
    },
}  # fmt: skip


@pytest.mark.parametrize("name", BOUNDS)
def test_a_request_of_more_is_refused_and_one_at_the_limit_is_not(name: str) -> None:
    url, body, most, told = BOUNDS[name]
    parse_line(orjson.dumps({"custom_id": "1", "url": url, "body": body(most)}))
    check_body(url, body(most))
    more = body(most + (9 if OPTION in told else 2))
    with pytest.raises(RequestRejected) as looked:
        parse_line(orjson.dumps({"custom_id": "1", "url": url, "body": more}))
    with pytest.raises(RequestRejected) as checked:
        check_body(url, more)
    assert told in looked.value.message == checked.value.message


def test_a_long_prompt_of_ids_is_one_prompt_and_large_answers_of_few_parts_are_taken() -> None:
    check_body(COMPLETION_URL, {"prompt": [1] * 400_000})
    check_body(EMBEDDINGS_URL, {"input": [[1] * 8192] * 20})
    check_body(CHAT_URL, said([{"type": "text", "text": "x" * 5_000_000}]))
    turns = [MESSAGE, {"role": "assistant", "tool_calls": [CALL]}] * (MAX_MESSAGES // 2)
    check_body(CHAT_URL, {"messages": turns})
    check_body(CHAT_URL, min_body(CHAT_URL) | {"kv_transfer_params": option(10 * MAX_OPTION)})


def test_ids_before_parts_do_not_hide_them() -> None:
    with pytest.raises(RequestRejected, match="more than 8192 objects"):
        check_body(EMBEDDINGS_URL, {"input": [1, *[PART] * MAX_OBJECTS, PART]})
