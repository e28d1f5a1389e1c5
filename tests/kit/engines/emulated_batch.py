"""Batches of greedy requests for the EMULATED suite, and what has to be true of them afterwards."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.verdicts.observer import Writes
from kit.verdicts.settled import assert_batch_settled, assert_committed_once, assert_nothing_left

from contract.redis.batches import BatchStore

#: Tokens asked of every request whose tokens are compared.
COUNT = 12


@dataclass
class Run:
    """One finished batch: output lines and error lines by custom_id."""

    answers: dict[str, dict[str, Any]]
    errors: dict[str, dict[str, Any]]

    @classmethod
    def read(cls, out: Path, errors: Path) -> Run:
        """Read the two files that the producer wrote."""
        return cls(_lines(out), _lines(errors))

    def tokens(self, custom_id: str) -> list[int]:
        """Return the tokens of one answer."""
        body = self.answers[custom_id]["response"]["body"]
        found: list[int] = body["choices"][0]["token_ids"]
        return found

    def all_tokens(self) -> list[list[int]]:
        """Return the tokens of all answers, in the order of the lines."""
        assert not self.errors
        return [self.tokens(f"r{n}") for n in range(len(self.answers))]


def assert_settled(
    store: BatchStore,
    redis_folder: Path,
    name: str,
    lines: Sequence[Mapping[str, Any]],
    failed: Mapping[str, str] | None = None,
) -> Writes:
    """Assert docs/explanation/delivery.md's promise on a batch: one result each, committed once,
    and nothing left; return what Redis wrote."""
    bodies = {str(line["custom_id"]): line for line in lines}
    assert_batch_settled(store, name, bodies, failed=failed, simulated=False)
    # The last lease ends together with the last result, its bookkeeping a moment later.
    assert_nothing_left(store)
    return assert_committed_once(redis_folder, bodies, name)


def prompts(count: int, seed: int = 4) -> list[list[int]]:
    """Return token prompts of 3 to 200 tokens: shorter and longer than a prefill chunk."""
    draw = random.Random(seed)
    return [[draw.randrange(4, 1024) for _ in range(draw.randint(3, 200))] for _ in range(count)]


def lines_of(prompts: Sequence[list[int]], count: int = COUNT) -> list[dict[str, Any]]:
    """Return request lines that ask for so many greedy tokens each."""
    return [
        {
            "custom_id": f"r{n}", "prompt": prompt, "max_tokens": count, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True,
        }
        for n, prompt in enumerate(prompts)
    ]  # fmt: skip


def _lines(file: Path) -> dict[str, dict[str, Any]]:
    if not file.exists():
        return {}
    read = [json.loads(line) for line in file.read_text().splitlines()]
    return {line["custom_id"]: line for line in read}
