"""Token ids that the model does not have, in a real engine: each ends its own request alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.hostile.engine_lines import Line, ended, small

from contract.openai.body import CHAT_URL, COMPLETION_URL
from demo.stack import MODEL

pytestmark = pytest.mark.timeout(300)
SIZE = 1024
#: A token that the tokenizer knows, and the model has no embedding for.
ADDED = "<added>"
CALLED = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def completion(prompt: Any, **fields: Any) -> Line:
    return COMPLETION_URL, {"prompt": prompt, "max_tokens": 4, "temperature": 0} | fields


def chat(text: str, **fields: Any) -> Line:
    return CHAT_URL, small(0)[1] | {"messages": [{"role": "user", "content": text}]} | fields


#: By name: the line, and the field of the id.
PAST: dict[str, tuple[Line, str]] = {
    "an id": (completion([5, 6, SIZE]), "prompt"),
    "an id, again": (completion([5, 6, SIZE]), "prompt"),
    "one of several prompts": (completion([[5, 6], [SIZE]]), "prompt"),
    "several answers": (completion([5, SIZE], n=3, temperature=1), "prompt"),
    "a text": (completion(f"a {ADDED}"), "prompt"),
    "a text of a known form": (completion(f"b {ADDED}"), "prompt"),
    "a chat": (chat(f"a {ADDED}"), "prompt"),
    "a chat of a known form": (chat(f"b {ADDED}"), "prompt"),
    "a word": (completion("a", bad_words=[ADDED]), "bad_words"),
}
OTHERS: dict[str, Line] = {
    "the last id": completion([5, 6, SIZE - 1]),
    **{f"text {n}": completion(f"word {n}") for n in range(3)},
    **{f"chat {n}": chat(f"word {n}") for n in range(3)},
}
#: What vLLM refuses itself.
TOO_FAR: dict[str, Line] = {
    "far": completion([SIZE + 1000]),
    "below": completion([-1]),
    "bias": completion("a", logit_bias={str(SIZE): 1}),
    "allowed": completion("a", allowed_token_ids=[SIZE]),
    "stop": completion("a", stop_token_ids=[SIZE], min_tokens=2),
}
TOOLS: dict[str, Line] = {
    "required": chat("a", tools=[CALLED], tool_choice="required"),
    "named": chat("a", tools=[CALLED], tool_choice={"type": "function", "function": {"name": "f"}}),
}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Return how each line ended in one engine, whose tokenizer knows one token more."""
    folder = tmp_path_factory.mktemp("vocabulary")
    model = Path(shutil.copytree(MODEL, folder / "model"))
    path = model / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    more = {"id": SIZE, "content": ADDED, "special": True, **flags}
    tokenizer["added_tokens"].append(more)
    path.write_text(json.dumps(tokenizer))
    lines = OTHERS | {name: line for name, (line, _) in PAST.items()} | TOO_FAR | TOOLS
    yield ended(folder, lines, model)


@pytest.mark.parametrize("name", PAST)
def test_an_id_past_the_vocabulary_is_its_requests_own_mistake(
    report: dict[str, Any], name: str
) -> None:
    found = report[name]
    assert found["kind"] == "RequestRejected", found
    assert f"{PAST[name][1]} has the token id {SIZE}" in found["message"]
    assert f"0 to {SIZE - 1}" in found["message"]
    assert found["other"]["kind"] == "answer"


@pytest.mark.parametrize("name", TOO_FAR)
def test_ids_that_vllm_refuses_itself_end_no_engine(report: dict[str, Any], name: str) -> None:
    assert report[name]["kind"] == "RequestRejected", report[name]
    assert report[name]["other"]["kind"] == "answer"


@pytest.mark.parametrize("name", OTHERS)
def test_other_prompts_are_answered(report: dict[str, Any], name: str) -> None:
    assert report[name]["kind"] == "answer", report[name]


@pytest.mark.parametrize("name", TOOLS)
def test_tools_that_must_be_called_need_a_parser_as_requests_md_says(
    report: dict[str, Any], name: str
) -> None:
    assert report[name]["kind"] == "RequestRejected", report[name]
    assert "--tool-call-parser" in report[name]["message"]
