"""What `submit --order` saves of a real engine's work, by the engine's own count."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.stacks.real_stack import Stack, read_jsonl, write_jsonl

from demo.stack import CPU_ENGINE_ARGS, Worker, tiny_model_worker

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]
DOCUMENTS, QUESTIONS = 24, 4
#: Room for six prompts or so: 80 blocks of 32 tokens, the smallest of vLLM's CPU kernels.
CACHE = (
    f"{CPU_ENGINE_ARGS} --max-num-seqs 2 --block-size 32 --num-gpu-blocks-override 80 "
    "--enable-prefix-caching --enable-prompt-tokens-details"
)


@pytest.fixture(scope="module")
def small_cache(stack: Stack) -> Iterator[Worker]:
    """Return a worker whose prefix cache holds a few documents only; queue `warmq.small`."""
    log = stack.folder / "small-cache.log"
    with tiny_model_worker(stack.url, log, served_model_name="small", engine_args=CACHE) as running:
        stack.ready(running, "warmq.small")
        yield running


def file_of_documents(path: Path, seed: int) -> Path:
    """Write documents × questions, all first questions first; their numbers are the custom_ids."""
    draw = random.Random(seed)
    words = [bytes(draw.choices(b"abcdefghijklmnop", k=5)).decode() for _ in range(200)]
    documents = [" ".join(draw.choices(words, k=110)) for _ in range(DOCUMENTS)]
    asked = [" ".join(draw.choices(words, k=4)) for _ in range(QUESTIONS)]
    return write_jsonl(path, [
        {"custom_id": f"d{d}q{q}", "method": "POST", "url": "/v1/completions",
         "body": {"prompt": f"{documents[d]}\n\n{asked[q]}", "max_tokens": 2, "temperature": 0}}
        for q in range(QUESTIONS) for d in range(DOCUMENTS)
    ])  # fmt: skip


def run(stack: Stack, file: Path, order: str, folder: Path) -> list[dict[str, Any]]:
    """Take a file through; return the usage of each answer in the file's order."""
    out = folder / f"{order}.jsonl"
    done = stack.producer("submit", file, "--model", "small", "--order", order, "-o", out)
    assert done.returncode == 0, done.stderr
    results = read_jsonl(out)
    assert [r["custom_id"] for r in results] == [
        f"d{d}q{q}" for q in range(QUESTIONS) for d in range(DOCUMENTS)
    ]
    return [result["response"]["body"]["usage"] for result in results]


def computed(usages: list[dict[str, Any]]) -> int:
    return sum(
        u["prompt_tokens"] - (u.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        for u in usages
    )


def test_an_ordered_file_computes_each_beginning_once_with_a_cache_far_smaller_than_all(
    stack: Stack, small_cache: Worker, tmp_path: Path
) -> None:
    as_is = run(stack, file_of_documents(tmp_path / "as-is.jsonl", 1), "input", tmp_path)
    ordered = run(stack, file_of_documents(tmp_path / "ordered.jsonl", 2), "prefix", tmp_path)
    assert computed(as_is) >= 0.9 * sum(u["prompt_tokens"] for u in as_is)
    # The first request of each document computes all of it, the others what is behind the last
    # whole block that they share: what is cached at most of each
    whole = [max(u["prompt_tokens_details"]["cached_tokens"] for u in ordered[d::DOCUMENTS])
             for d in range(DOCUMENTS)]  # fmt: skip
    least = sum(u["prompt_tokens"] for u in ordered) - (QUESTIONS - 1) * sum(whole)
    assert min(whole) >= 300
    assert computed(ordered) <= 1.02 * least
    assert computed(ordered) <= 0.5 * computed(as_is)
