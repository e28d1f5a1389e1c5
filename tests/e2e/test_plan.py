"""`producer plan` counts what vLLM counts, with the tokenizer of the worker's model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kit.commands.planned_files import SHAPES, write_shape
from kit.stacks.real_stack import Stack, write_jsonl

from demo.stack import MODEL
from producer.submit.prompt_tokens import Tokenizer, prompt_of

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("worker")]

TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}
#: One request of each form whose prompt the tokenizer knows.
FORMS: list[dict[str, Any]] = [
    {"prompt": "Once upon a time"},
    {"prompt": "Once upon a time", "add_special_tokens": False},
    {"prompt": ["Once upon", "a time there was"]},
    {"prompt": [5, 6, 7, 8]},
    {"prompt": [[5, 6], [7, 8, 9]]},
    {"prompt": "one two three four five six seven", "truncate_prompt_tokens": 3},
    {"prompt": "Once upon a time", "n": 2, "temperature": 1},
    {"prompt": "Once upon a time", "echo": True},
    {"messages": [{"role": "user", "content": "Hello"}]},
    {"messages": [{"role": "user", "content": "Hello"}], "add_special_tokens": True},
    {"messages": [{"role": "user", "content": "Hello"}], "add_generation_prompt": False},
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello, größer 中文"},
            {"role": "assistant", "content": "Yes"},
            {"role": "user", "content": "And?"},
        ]
    },
    {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hel"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
            }
        ]
    },
    {"messages": [{"role": "user", "content": "Hello"}], "tools": [TOOL], "tool_choice": "none"},
]


def compared(stack: Stack, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what was planned of a file, and its batch at the end."""
    planned = stack.producer("plan", path, "--json")
    done = stack.producer("submit", path, "--wait", "--json")
    assert (planned.returncode, done.returncode) == (0, 0), (planned.stderr, done.stderr)
    return json.loads(planned.stdout), json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_of_a_file_are_planned_exactly(stack: Stack, tmp_path: Path, shape: str) -> None:
    planned, batch = compared(stack, write_shape(tmp_path / "in.jsonl", shape, share=0.1))
    assert planned["prompt_tokens"]["total"] == batch["usage"]["prompt_tokens"]
    assert planned["prompt_tokens"]["estimated_requests"] == 0
    assert planned["completion_tokens"]["expected"] == batch["usage"]["completion_tokens"]
    assert planned["completion_tokens"]["limit"] == batch["usage"]["completion_tokens"]


def test_tokens_of_every_form_of_prompt_are_planned_exactly(stack: Stack, tmp_path: Path) -> None:
    lines = [form | {"custom_id": f"f{n}", "max_tokens": 2} for n, form in enumerate(FORMS)]
    path = write_jsonl(tmp_path / "forms.jsonl", lines)
    out = tmp_path / "out.jsonl"
    done = stack.producer("submit", path, "-o", out)
    assert done.returncode == 0, done.stderr
    counted = [
        json.loads(text)["response"]["body"]["usage"]["prompt_tokens"]
        for text in out.read_text().splitlines()
    ]
    tokenizer = Tokenizer(str(MODEL))
    urls = ["/v1/chat/completions" if "messages" in form else "/v1/completions" for form in FORMS]
    prompts = [prompt_of(url, form, tokenizer.chat) for url, form in zip(urls, FORMS, strict=True)]
    assert all(map(tokenizer.exact, prompts))
    assert dict(enumerate(tokenizer.count(prompts))) == dict(enumerate(counted))


def test_a_warmed_worker_announces_its_answers_and_its_cache(stack: Stack, tmp_path: Path) -> None:
    path = write_shape(tmp_path / "in.jsonl", "all lengths, shared beginnings", share=0.2)
    planned, _ = compared(stack, path)
    (worker,) = stack.store.workers("warmq")
    assert (worker["slots"], worker["prefix_caching"]) == (32, True)
    assert worker["kv_tokens"] > 10_000
    assert worker["mean_answer"] > 0
    assert planned["shared_prefixes"]["saved_tokens"] > 0
    assert planned["shared_prefixes"]["kv_tokens"] == worker["kv_tokens"]
