"""Requests past vLLM's serving classes are answered, and end, as those through them do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kit.engines.both_ways import Line, answered_both_ways
from kit.engines.run_batch_lines import GENERATING, LENGTH
from kit.stacks import real_stack
from kit.stacks.real_stack import asked
from questions import held_out_reading

from contract.openai.body import CHAT_URL, COMPLETION_URL

pytestmark = pytest.mark.timeout(600)
WORDS = f"--max-model-len {LENGTH} --override-generation-config '{{\"temperature\": 0}}'"
GREEDY = {"temperature": 0, "max_tokens": 12}


def chat(*contents: str, **fields: Any) -> Line:
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    return CHAT_URL, GREEDY | {"messages": messages} | fields


def text(prompt: Any, **fields: Any) -> Line:
    return COMPLETION_URL, GREEDY | {"prompt": prompt} | fields


def as_schema(*names: str) -> dict[str, Any]:
    """Return a response_format: an object of these fields, each a short text or a number."""
    kinds = [{"type": "string", "maxLength": 4}, {"type": "integer"}]
    properties = {name: kinds[at % 2] for at, name in enumerate(names)}
    schema = {"type": "object", "properties": properties, "required": list(names)}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


#: What a plan has to fill in, or leave alone: ends, limits, odd texts, and what is wrong.
ODD: dict[str, Line] = {
    "stop text": text("1 2 3 4", stop=["5", " "]),
    "stop text again": text("2 + 3 =", stop=["5", " "]),
    "stop token": text("2 + 3 =", stop_token_ids=[5, 6, 7, 8, 9, 10]),
    "at least": text("2 + 3 =", min_tokens=9),
    "no end": chat("2 + 3 =", ignore_eos=True),
    "no end again": chat("3 + 3 =", ignore_eos=True),
    "newer limit": chat("a", max_completion_tokens=3),
    "seeded": text("2 + 3 =", temperature=0.9, seed=11, top_p=0.9, top_k=20, min_p=0.01),
    "seeded again": text("2 + 4 =", temperature=0.9, seed=11, top_p=0.9, top_k=20, min_p=0.01),
    "penalties": text("a a a a", presence_penalty=1, frequency_penalty=1, repetition_penalty=1.2),
    "another name": chat("2 + 3 =", model="whatever"),
    "a user": chat("2 + 3 =", user="me"),
    "Korean": chat("한국의 수도는?"),
    "signs": text('\u0000\u2028"\\\n\t🦊 <|im_end|> </s>'),
    "three turns": chat("2 + 3 =", "5", "3 + 3 ="),
    "empty turn": chat("", "", "2 + 3 ="),
    "fits": text("2 " * 400, max_tokens=8),
    "fills": text("2 " * 900, max_tokens=200),
    "too long": text("2 " * 3000, max_tokens=8),
    "too many characters": text("2" * 40_000),
    "limit too high": text("2 + 3 =", max_tokens=LENGTH),
    "no limit": (COMPLETION_URL, {"prompt": "a", "temperature": 0}),
    "no limit again": (COMPLETION_URL, {"prompt": "b", "temperature": 0}),
    "empty": text(""),
    "no messages": (CHAT_URL, GREEDY | {"messages": []}),
    "two prompts": text(["2 + 3 =", "3 + 3 ="]),
    "tokens": text([5, 6, 7]),
    "two choices": text("a", n=2),
    "echo": text("2 + 3 =", echo=True),
    "logprobs": text("2 + 3 =", logprobs=2),
    "hot": text("a", temperature=-1),
    "parts": (
        CHAT_URL,
        GREEDY | {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
    ),
    "named": (CHAT_URL, GREEDY | {"messages": [{"role": "user", "content": "a", "name": "b"}]}),
    "template options": chat("a", chat_template_kwargs={"x": 1}),
    "continued": chat("a", "b", add_generation_prompt=False),
    "json": chat("2 + 3 =", response_format={"type": "json_object"}),
    "schema": chat("2 + 3 =", response_format=as_schema("sum")),
    "schema again": chat("3 + 3 =", response_format=as_schema("sum")),
    "another schema": text("2 + 3 =", response_format=as_schema("total"), max_tokens=40),
    "large schema": text("2 + 3 =", response_format=as_schema(*map(str, range(80)))),
    "no schema": text("2 + 3 =", response_format={"type": "json_schema"}),
    "wrong schema": text("2 + 3 =", structured_outputs={"json": {"type": "nothing"}}),
    "two kinds": text("2 + 3 =", structured_outputs={"choice": ["a"], "regex": "b"}),
    "choice": chat("2 + 3 =", structured_outputs={"choice": ["good", "bad", "mixed"]}),
    "choice again": chat("a", structured_outputs={"choice": ["good", "bad", "mixed"]}),
    "regex": text("2 + 3 =", structured_outputs={"regex": "[ab]{3}"}),
    "grammar": text("2 + 3 =", structured_outputs={"grammar": 'root ::= "a" | "b"'}),
    "cut prompt": text("2 " * 900, truncate_prompt_tokens=9),
    "a tool role": (
        CHAT_URL,
        GREEDY | {"messages": [{"role": "tool", "content": "a", "tool_call_id": "1"}]},
    ),
}
#: Of these some must go leanly, and none of the others may.
LEAN = {
    "stop text",
    "stop text again",
    "stop token",
    "at least",
    "no end",
    "no end again",
    "newer limit",
    "seeded",
    "seeded again",
    "penalties",
    "another name",
    "a user",
    "Korean",
    "signs",
    "three turns",
    "empty turn",
    "fits",
    "json",
    "schema",
    "schema again",
    "another schema",
    "large schema",
    "choice",
    "choice again",
    "regex",
    "grammar",
    "no limit",
    "no limit again",
}


def questions() -> dict[str, Line]:
    known = {f"q{n}": q for n, q in enumerate(real_stack.listed_questions(300))}
    reading = {f"r{n}": q for n, q in enumerate(held_out_reading(77, 150))}
    found = {}
    for n, (name, question) in enumerate((known | reading).items()):
        url = CHAT_URL if n % 2 else COMPLETION_URL
        found[name] = url, asked(question, bool(n % 2), max_tokens=24)
    return found


def test_every_answer_error_and_end_is_that_of_the_full_way(tmp_path: Path) -> None:
    batch = {
        f"batch {found['custom_id']}": (found["url"], found["body"])
        for found in GENERATING
        if not found["body"].get("stream")
    }
    asking = questions()
    report = answered_both_ways(tmp_path, asking | ODD | batch, WORDS)
    assert report["left"] == 0
    answers = report["answers"]
    for name, found in answers.items():
        assert found["lean"] == found["full"], name
    leanly = {name for name, found in answers.items() if found["leanly"]}
    assert asking.keys() <= leanly
    assert leanly & ODD.keys() == LEAN
    assert {"batch request-1", "batch request-2", "batch example"} <= leanly
    ends = {answers[name]["lean"]["body"]["choices"][0]["finish_reason"] for name in leanly}
    assert ends == {"stop", "length"}
    ended = report["ends"]
    assert len(ended.pop("read")) == 1
    assert ended == {
        "given_up": "CancelledError", "left": 0, "killed": "EngineDead", "inside": True,
        "leanly": ["given up", "killed"],
    }  # fmt: skip
