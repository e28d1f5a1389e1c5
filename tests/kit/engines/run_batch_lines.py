"""Lines that `vllm run-batch` and a worker both get.

They are run-batch's documented example and have the forms of its own tests: chats with a system
message, an unknown model, a bad url, a stream, tools, reasoning, images, embeddings, scores,
rerankings. Where the model's text must say something, it is forced by structured output.
"""

from __future__ import annotations

import re
from typing import Any

from kit.servers.pictures import data_url, part, png

from contract.openai.body import CHAT_URL

NAME = "tiny"
PARSERS = (
    "--enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser granite "
    "--structured-outputs-config '"
    '{"backend": "xgrammar", "enable_in_reasoning": true, "disable_any_whitespace": true}'
    "'"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Seoul", "Busan"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Busan"}}</tool_call>'
THOUGHT = "Here is my thought process: two and three. Here is my response: 5"
#: Room for the documented example's 1,000 tokens; a worker's own default, 1,024, is not reached.
LENGTH = 1050
#: The documented example names no temperature.
SERVING = (
    f"{PARSERS} --max-model-len {LENGTH} --limit-mm-per-prompt '{{\"image\": 2}}' "
    "--override-generation-config '{\"temperature\": 0}'"
)
POOLING = "--runner pooling --convert embed"


def line(custom_id: str, url: str, **body: Any) -> dict[str, Any]:
    body = {"model": NAME, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def chat(custom_id: str, **body: Any) -> dict[str, Any]:
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "What is 2 + 3?"},
    ]
    settings = {"temperature": 0, "seed": 7, "max_tokens": 80}
    return line(custom_id, CHAT_URL, **({"messages": messages} | settings | body))


def forced(custom_id: str, text: str, **body: Any) -> dict[str, Any]:
    """Return a chat whose answer is this text."""
    pattern = re.sub(r"([{}.])", r"\\\1", text)
    return chat(custom_id, structured_outputs={"regex": pattern}, max_tokens=400, **body)


GENERATING = [
    # The documented example, but for the model's name
    line("request-1", CHAT_URL, max_completion_tokens=1000, messages=[
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Hello world!"}]),
    line("request-2", CHAT_URL, max_completion_tokens=1000, messages=[
        {"role": "system", "content": "You are an unhelpful assistant."},
        {"role": "user", "content": "Hello world!"}]),
    chat("example", max_tokens=None, max_completion_tokens=100),
    chat("unlimited", max_tokens=None, ignore_eos=True),
    chat("too long", max_tokens=LENGTH - 1),
    chat("logprobs", logprobs=True, top_logprobs=3),
    chat("logprobs of each", logprobs=True, top_logprobs=0, n=2, temperature=1, ignore_eos=True),
    chat("prompt logprobs", prompt_logprobs=1),
    chat("token ids", return_token_ids=True),
    chat("json", response_format={"type": "json_schema", "json_schema": {
        "name": "answer", "schema": {"type": "object", "properties": {"n": {"enum": [5, 6]}},
                                     "required": ["n"], "additionalProperties": False}}}),
    forced("text", "no tool"),
    forced("tool by itself", CALL, tools=[TOOL], tool_choice="auto"),
    forced("tool not used", "no tool", tools=[TOOL], tool_choice="auto"),
    chat("tool required", tools=[TOOL], tool_choice="required"),
    chat("tool named", tools=[TOOL],
         tool_choice={"type": "function", "function": {"name": "get_weather"}}),
    forced("thought", THOUGHT),
    forced("thought hidden", THOUGHT, include_reasoning=False),
    forced("thought with logprobs", THOUGHT, logprobs=True),
    chat("unknown model", model="NonExistModel"),
    chat("a stream", stream=True),
    line("bad url", "/bad_url", messages=[{"role": "user", "content": "x"}]),
    line("pooling", "/v1/embeddings", input="x"),
]  # fmt: skip
FAILING = {"too long", "unknown model", "a stream", "bad url", "pooling"}
#: Lines that end run-batch before anything is written; nothing there catches what they raise.
ENDING: list[dict[str, Any]] = [
    chat("tool unknown", tools=[TOOL],
         tool_choice={"type": "function", "function": {"name": "no_such"}}),
    chat("no number", max_tokens="many"),
    {"invalid_field": "no id"} | {k: v for k, v in chat("").items() if k != "custom_id"},
]  # fmt: skip
RED, BLUE = png("red"), png("blue")
QUESTION = {"type": "text", "text": "What is 2 + 3?"}


def seen(custom_id: str, *parts: dict[str, Any]) -> dict[str, Any]:
    """Return a chat of these parts, with its tokens and what else it might have said."""
    return chat(custom_id, messages=[{"role": "user", "content": list(parts)}], max_tokens=16,
                return_token_ids=True, logprobs=True, top_logprobs=2)  # fmt: skip


def seeing(address: str) -> list[dict[str, Any]]:
    """Return chats with images; some of them are at this address."""
    red, blue = part(data_url(RED)), part(data_url(BLUE))
    return [
        seen("no image", QUESTION),
        seen("red", QUESTION, red),
        seen("blue", QUESTION, blue),
        seen("image first", red, QUESTION),
        seen("two images", red, QUESTION, blue),
        seen("wide", QUESTION, part(data_url(png("green", 300, 100)), detail="low")),
        seen("fetched", QUESTION, part(f"{address}/red.png")),
        chat("earlier image", messages=[
            {"role": "user", "content": [QUESTION, blue]},
            {"role": "assistant", "content": "5"},
            {"role": "user", "content": "What is 3 + 3?"}]),
        seen("three images", red, QUESTION, blue, red),
        seen("cut", QUESTION, part(data_url(RED[: len(RED) // 2]))),
        seen("no picture", QUESTION, part("data:image/png;base64,AAAA")),
        seen("not there", QUESTION, part(f"{address}/none.png")),
        seen("a file", QUESTION, part("file:///etc/hostname")),
        seen("a sound", QUESTION, {"type": "input_audio", "input_audio": {
            "data": "AAAA", "format": "wav"}}),
    ]  # fmt: skip


SEEN = ("no image", "red", "blue", "image first", "two images", "wide", "fetched")
#: None of them is shown to the model.
UNSEEN = {"three images", "cut", "no picture", "not there", "a file", "a sound"}
DOCUMENTS = ["2 + 3 is 5.", "Seoul is a city."]
POOLED = [
    line("text", "/v1/embeddings", input="What is 2 + 3?"),
    line("texts", "/v1/embeddings", input=["What is 2 + 3?", "Hello"]),
    line("tokens", "/v1/embeddings", input=[[1, 2, 3], [4]]),
    line("messages", "/v1/embeddings", messages=[{"role": "user", "content": "Hello"}]),
    line("base64", "/v1/embeddings", input="Hello", encoding_format="base64"),
    line("cut", "/v1/embeddings", input="Hello " * 2000, truncate_prompt_tokens=100),
    line("score", "/score", queries="What is 2 + 3?", documents=DOCUMENTS),
    line("score v1", "/v1/score", text_1=DOCUMENTS, text_2=DOCUMENTS),
    line("rerank", "/rerank", query="What is 2 + 3?", documents=DOCUMENTS),
    line("rerank v1", "/v1/rerank", query="What is 2 + 3?", documents=DOCUMENTS, top_n=1),
    line("rerank v2", "/v2/rerank", query="What is 2 + 3?", documents=DOCUMENTS),
    line("too long", "/v1/embeddings", input="Hello " * 2000),
    line("dimensions", "/v1/embeddings", input="Hello", dimensions=8),
    line("generating", CHAT_URL, messages=[{"role": "user", "content": "x"}]),
    line("an image", "/v1/embeddings", messages=[
        {"role": "user", "content": [part(data_url(RED))]}]),
]  # fmt: skip
POOLED_FAILING = {"too long", "dimensions", "generating", "an image"}
