"""The forms of streams that servers are known for, and of their errors.

tests/kit/servers/server_forms has the recorded ones.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from kit.servers.scripted_answers import Raw, answer, answered_by, stream

from contract.errors import EngineDead, RequestFailed, RequestRejected
from contract.streaming import texts_of
from demo.stack import ROOT

FORMS = Path(__file__).parents[3] / "kit" / "servers" / "server_forms"
PAGE = ROOT / "docs/evidence/openai-servers.md"
Json = dict[str, Any]
SAID = "Take an umbrella."
THOUGHT = "Rain falls. "
THINKING = {"type": "thinking", "thinking": THOUGHT, "signature": "c2ln"}
#: What each server's message has beside its role and its content, and what its choice has.
BESIDE: dict[str, tuple[Json, Json]] = {
    "vllm": ({"reasoning": THOUGHT}, {"stop_reason": None}),
    "sglang": ({"reasoning_content": THOUGHT}, {"matched_stop": 151645}),
    "llama_cpp": ({}, {}),
    "litellm": ({"reasoning_content": THOUGHT, "thinking_blocks": [THINKING],
                 "provider_specific_fields": {"thinking_blocks": [THINKING]}}, {}),
    "mistral": ({"content": [{"type": "thinking", "thinking": [{"type": "text", "text": THOUGHT}]},
                             {"type": "text", "text": SAID}]}, {}),
    "perplexity": ({}, {}),
    "together": ({"token_id": 128009}, {"seed": 8213, "text": SAID}),
    "fireworks": ({}, {}),
    "azure": ({}, {"content_filter_results": {
        name: {"filtered": False, "severity": "safe"} for name in ("hate", "violence")},
        "content_filter_offsets": {"check_offset": 0, "start_offset": 0, "end_offset": 17}}),
    "lm_studio": ({"reasoning_content": THOUGHT}, {}),
    "ollama": ({"reasoning": THOUGHT}, {}),
    "openrouter": ({"reasoning": THOUGHT, "reasoning_details": [{"type": "reasoning.text",
                    "text": THOUGHT, "format": "unknown", "index": 0}]},
                   {"native_finish_reason": "STOP"}),
}  # fmt: skip


def test_every_form_is_on_the_page_and_has_its_answer() -> None:
    names = {file.stem for file in FORMS.glob("*.sse")}
    assert names == BESIDE.keys()
    first_table, _ = PAGE.read_text().split("\n## ", 1)[0].split("What is read")
    assert set(re.findall(r"^\| `(\w+)` \|", first_table, re.MULTILINE)) == names


@pytest.mark.parametrize("name", BESIDE)
async def test_a_stream_of_each_server_is_read_whole(name: str) -> None:
    raw = (FORMS / f"{name}.sse").read_bytes()
    async with answered_by(lambda _: Raw([raw]), vllm=name == "vllm") as (server, engine):
        found = await answer(engine)
        assert len(server.bodies) == 1
    message, beside = BESIDE[name]
    (choice,) = found["choices"]
    assert found["object"] == "chat.completion"
    assert texts_of(found) == {0: SAID}  # what of it is shown as it comes
    assert found["id"] and found["model"]
    assert (found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"]) == (9, 7)
    assert choice["finish_reason"] == "stop"
    told = {k: v for k, v in choice["message"].items() if v is not None}
    assert told == {"role": "assistant", "content": SAID} | message
    rest = {"index", "finish_reason", "message", "logprobs"}
    if name == "vllm":  # whose answers name what they have not
        rest |= {"token_ids", "routed_experts"}
    assert {k: v for k, v in choice.items() if k not in rest} == beside


def event(data: bytes) -> Raw:
    return Raw([b"data: " + data + b"\n\n"])


@pytest.mark.parametrize(
    ("raw", "words", "refused"),
    [
        # vLLM and SGLang, in a stream
        (event(b'{"error":{"message":"too long","type":"BadRequestError","code":400}}'),
            "too long", True),
        (event(b'{"error":{"object":"error","message":"too long","type":"BadRequestError",'
               b'"param":null,"code":400}}'), "too long", True),
        # llama.cpp: older ones have a field `error`
        (Raw([b'error: {"code":500,"message":"no slot","type":"server_error"}\n\n']),
            "no slot", False),
        (event(b'{"error":{"code":400,"message":"too long","type":"exceed_context_size_error",'
               b'"n_ctx":4096}}'), "too long", True),
        # OpenRouter: a provider fails in the middle
        (stream({"id": "gen-1", "provider": "Tiny", "model": "m",
                 "error": {"code": "server_error", "message": "Provider disconnected"},
                 "choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": "error"}]}),
            "Provider disconnected", False),
        # LiteLLM
        (event(b'{"error":{"message":"litellm.BadRequestError: no","type":"None","param":"None",'
               b'"code":"400"}}'), "litellm.BadRequestError: no", True),
        # Together, Fireworks
        (event(b'{"error":{"message":"Input too long","type":"invalid_request_error","param":null,'
               b'"code":null}}'), "Input too long", True),
        # Mistral
        (event(b'{"object":"error","message":"Invalid model: x","type":"invalid_model",'
               b'"param":null,"code":"1500"}'), "Invalid model", True),
        # Azure: its filter
        (event(b'{"error":{"message":"The prompt was filtered","type":null,"param":"prompt",'
               b'"code":"content_filter","status":400}}'), "was filtered", True),
        # Ollama, LM Studio
        (Raw([b'{"error":"model runner has ended"}'], "application/json"), "runner has", False),
        (Raw([b'event: error\ndata: {"error":{"message":"Model unloaded"}}\n\n']),
            "Model unloaded", False),
    ],
)  # fmt: skip
async def test_each_servers_errors_keep_their_words(raw: Raw, words: str, refused: bool) -> None:
    async with answered_by(lambda _: raw) as (server, engine):
        with pytest.raises(RequestRejected if refused else (RequestFailed, EngineDead)) as caught:
            await answer(engine)
        assert words in str(caught.value)
        assert not refused or len(server.bodies) == 1
