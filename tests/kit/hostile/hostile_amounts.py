"""Hostile requests of very many parts: at the limits of contract/openai/amounts.py, and beyond."""

from __future__ import annotations

from kit.hostile.hostile_request import EITHER, Body, Hostile, chat, completion

from contract.openai.amounts import MAX_MESSAGES, MAX_OBJECTS, MAX_PROMPTS, MAX_TOOLS
from contract.openai.body import (
    CHAT_URL,
    COMPLETION_URL,
    COUNT_TOKENS_URL,
    MESSAGES_URL,
    RESPONSES_URL,
    TOKENIZE_URL,
)
from contract.openai.pooling import EMBEDDINGS_URL, RERANK_URLS, SCORE_URLS

MESSAGE = {"role": "user", "content": "x"}
PART = {"type": "text", "text": "x"}
PIXEL = "data:image/gif;base64,R0lGODdhAQABAIAAAP///////ywAAAAAAQABAAACAkQBADs="
ENTRIES = MAX_OBJECTS - 2
MANY = 100_000


def call(arguments: str) -> Body:
    """Return a call of a tool."""
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}


def said(content: object, role: str = "user", **more: object) -> Body:
    """Return a conversation with such a message, for chats and Anthropic's messages."""
    return {"messages": [{"role": role, "content": content} | more], "max_tokens": 4}


def response(content: object, count: int = 1) -> Body:
    """Return a response to so many messages."""
    return {"input": [{"role": "user", "content": content}] * count, "max_output_tokens": 4}


def tools(count: int) -> list[Body]:
    """Return tools with names of their own."""
    return [
        {"type": "function", "function": {"name": f"f{n}", "parameters": {"type": "object"}}}
        for n in range(count)
    ]


#: Beyond a limit: refused before anything is made of them.
BEYOND = (
    Hostile("20,000 images", CHAT_URL,
            lambda: said([{"type": "image_url", "image_url": {"url": PIXEL}}] * 20_000)),
    Hostile("20,000 calls of tools", CHAT_URL,
            lambda: said(None, "assistant", tool_calls=[call("{}")] * 20_000)),
    Hostile("100,000 tools", CHAT_URL, lambda: chat(tools=[{}] * MANY)),
    Hostile("100,000 documents of a chat", CHAT_URL, lambda: chat(documents=[{"a": "x"}] * MANY)),
    Hostile("240,000 prompts of an id", COMPLETION_URL, lambda: completion(prompt=[[1]] * 240_000)),
    Hostile("100,000 messages to tokenize", TOKENIZE_URL, lambda: {"messages": [MESSAGE] * MANY}),
    Hostile("100,000 messages to count", COUNT_TOKENS_URL, lambda: {"messages": [MESSAGE] * MANY}),
    Hostile("100,000 blocks", MESSAGES_URL, lambda: said([PART] * MANY)),
    Hostile("100,000 blocks in a block", MESSAGES_URL,
            lambda: said([{"type": "tool_result", "tool_use_id": "a", "content": [PART] * MANY}])),
    Hostile("100,000 blocks of a system text", MESSAGES_URL,
            lambda: {"system": [PART] * MANY} | said("x")),
    Hostile("100,000 messages of a response", RESPONSES_URL, lambda: response("x", MANY)),
    Hostile("100,000 parts of a response", RESPONSES_URL,
            lambda: response([{"type": "input_text", "text": "x"}] * MANY)),
    Hostile("metadata of 100,000", RESPONSES_URL,
            lambda: response("x") | {"metadata": {str(n): "x" for n in range(MANY)}}),
    Hostile("100,000 texts to embed", EMBEDDINGS_URL, lambda: {"input": ["x"] * MANY}),
    Hostile("100,000 documents", RERANK_URLS[0], lambda: {"query": "x", "documents": ["x"] * MANY}),
    Hostile("100,000 texts to score", SCORE_URLS[0],
            lambda: {"text_1": ["x"] * MANY, "text_2": ["x"] * MANY}),
    Hostile("a role of 7 MB cut off", CHAT_URL,
            lambda: said("x", "r e " * 1_750_000) | {"truncate_prompt_tokens": 10}),
    Hostile("a key of 7 MB to count", COUNT_TOKENS_URL, lambda: {"messages": [
        {"role": "assistant", "content": [
            {"type": "tool_use", "id": "a", "name": "f", "input": {"k e " * 1_750_000: 1}}]}]}),
    Hostile("arguments of a call, 5 MB", CHAT_URL,
            lambda: said(None, "assistant", tool_calls=[call(f"[{'1,' * 2_500_000}1]")])),
)  # fmt: skip
#: At a limit: the engine reads all of it.
AT_MOST = (
    Hostile("2,048 messages", CHAT_URL, lambda: chat(messages=[MESSAGE] * MAX_MESSAGES)),
    Hostile("8,000 parts", CHAT_URL, lambda: said([PART] * ENTRIES)),
    Hostile("4,000 images", CHAT_URL,
            lambda: said([{"type": "image_url", "image_url": {"url": PIXEL}}] * (ENTRIES // 2))),
    Hostile("4,000 calls of tools", CHAT_URL,
            lambda: said(None, "assistant", tool_calls=[call("{}")] * (ENTRIES // 2)), EITHER),
    Hostile("arguments of a call, 60,000 values", CHAT_URL,
            lambda: said(None, "assistant", tool_calls=[call(f"[{'1,' * 60_000}1]")]), EITHER),
    Hostile("1,024 tools", CHAT_URL,
            lambda: chat(tools=tools(MAX_TOOLS), tool_choice="required"), EITHER),
    Hostile("2,048 documents of a chat", CHAT_URL,
            lambda: chat(documents=[{"text": "x"}] * MAX_PROMPTS), EITHER),
    Hostile("content 90 deep", CHAT_URL, lambda: said([PART | {"a": deep(90)}]), EITHER),
    Hostile("2,048 prompts", COMPLETION_URL,
            lambda: completion(prompt=["Hello"] * MAX_PROMPTS, ignore_eos=True), EITHER),
    Hostile("prompt of 450,000 ids cut off", COMPLETION_URL,
            lambda: completion(prompt=[1] * 450_000, truncate_prompt_tokens=4, echo=True), EITHER),
    Hostile("1,000 prompts with logprobs", COMPLETION_URL,
            lambda: completion(prompt=["Hello you " * 20] * 1000, echo=True, logprobs=20), EITHER),
    Hostile("n of 128 for 16 prompts", COMPLETION_URL,
            lambda: completion(prompt=["Hello"] * 16, n=128, ignore_eos=True, temperature=1),
            EITHER),
    Hostile("logprobs of 64 long prompts", COMPLETION_URL,
            lambda: completion(prompt=["one two three " * 100] * 64, prompt_logprobs=20), EITHER),
    Hostile("logprobs of 128 long answers", CHAT_URL,
            lambda: chat(n=128, logprobs=True, top_logprobs=20, max_tokens=900, ignore_eos=True,
                         temperature=1),
            EITHER),
    Hostile("prompt of 450,000 ids", COMPLETION_URL, lambda: completion(prompt=[1] * 450_000)),
    Hostile("450 prompts of 1,000 ids cut off", COMPLETION_URL,
            lambda: completion(prompt=[[1] * 1000] * 450, truncate_prompt_tokens=1), EITHER),
    Hostile("8,000 blocks", MESSAGES_URL, lambda: said([PART] * ENTRIES)),
    Hostile("8,000 blocks in a block", MESSAGES_URL, lambda: said(
        [{"type": "tool_result", "tool_use_id": "a", "content": [PART] * (ENTRIES - 1)}]), EITHER),
    Hostile("60,000 values of a tool's use", MESSAGES_URL, lambda: said(
        [{"type": "tool_use", "id": "a", "name": "f", "input": {str(n): 1 for n in range(60_000)}}],
        "assistant"), EITHER),
    Hostile("2,048 messages of a response", RESPONSES_URL, lambda: response("x", MAX_MESSAGES)),
    Hostile("8,000 parts of a response", RESPONSES_URL,
            lambda: response([{"type": "input_text", "text": "x"}] * ENTRIES)),
    Hostile("tokens of 128,000 characters", TOKENIZE_URL,
            lambda: {"prompt": "a b " * 32_000, "return_token_strs": True}, EITHER),
)  # fmt: skip


def deep(levels: int) -> object:
    """Return lists in lists."""
    made: object = 1
    for _ in range(levels):
        made = [made]
    return made


AMOUNTS = (*BEYOND, *AT_MOST)
