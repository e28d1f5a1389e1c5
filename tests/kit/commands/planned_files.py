"""Files of different shape for `producer plan`: what is long, what is short, what is shared."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kit.stacks.real_stack import write_jsonl

WORDS = "apple river stone cloud green seven table horse light paper".split()
Line = dict[str, Any]
#: So that an answer has exactly as many tokens as its max_tokens.
TO_THE_LIMIT = {"ignore_eos": True, "temperature": 0}


def _text(dice: random.Random, least: int, most: int) -> str:
    return " ".join(dice.choice(WORDS) for _ in range(dice.randint(least, most)))


def short_prompts(count: int, dice: random.Random) -> Iterator[Line]:
    """Yield chats with short prompts and long answers."""
    for number in range(count):
        asked = [{"role": "user", "content": f"{number} {_text(dice, 3, 10)}"}]
        yield {"messages": asked, "max_tokens": dice.randint(100, 250)} | TO_THE_LIMIT


def long_prompts(count: int, dice: random.Random) -> Iterator[Line]:
    """Yield completions with long prompts and short answers."""
    for number in range(count):
        prompt = f"{number} {_text(dice, 120, 220)}"
        yield {"prompt": prompt, "max_tokens": dice.randint(4, 12)} | TO_THE_LIMIT


def shared_prompts(count: int, dice: random.Random) -> Iterator[Line]:
    """Yield chats of all lengths that share 40 system messages, taking turns."""
    systems = [f"document {number} {_text(dice, 150, 150)}" for number in range(40)]
    for number in range(count):
        messages = [
            {"role": "system", "content": systems[number % len(systems)]},
            {"role": "user", "content": f"{number} {_text(dice, 5, 30)}"},
        ]
        yield {"messages": messages, "max_tokens": dice.choice([8, 16, 32, 64, 120])} | TO_THE_LIMIT


#: The files of three shapes, and how many lines each has to take about as long as the others.
SHAPES: dict[str, tuple[Callable[[int, random.Random], Iterator[Line]], int]] = {
    "short prompts, long answers": (short_prompts, 300),
    "long prompts, short answers": (long_prompts, 500),
    "all lengths, shared beginnings": (shared_prompts, 600),
}


def write_shape(path: Path, shape: str, share: float = 1.0, seed: int = 1) -> Path:
    """Write the file of one shape, or a share of its lines."""
    lines, count = SHAPES[shape]
    return write_jsonl(path, list(lines(max(1, int(count * share)), random.Random(seed))))
