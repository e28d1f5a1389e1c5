"""Batches of `submit --dedupe`: lines that ask the same, and what became of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
from kit.commands.support import chat_line, queued, state, write_lines

from contract.redis.batches import BatchStore
from producer.collect.collect import Collector
from producer.submit.submission import Submission

ONCE = Submission("b1", "warmq", 6, dedupe=True)
#: custom_id and content of lines of which a, c and f ask the same, and b and d.
ASKED = {"a": "one", "b": "two", "c": "one", "d": "two", "e": "three", "f": "one"}


def greedy(custom_id: str | None, content: str, **body: Any) -> dict[str, Any]:
    """Return a line with temperature 0."""
    return chat_line(custom_id, content, temperature=0, **body)


def six_lines(path: Path) -> Path:
    """Write the lines of ASKED."""
    return write_lines(path, (greedy(name, content) for name, content in ASKED.items()))


def collect(store: BatchStore, order: str = "input", **options: bool) -> list[dict[str, Any]]:
    """Return the output lines of the batch."""
    lines = Collector(store, state(store, "b1"), **({"follow": False} | options)).lines(order)
    return [orjson.loads(line.json) for line in lines]


def custom_ids(lines: list[dict[str, Any]]) -> list[str]:
    """Return whose each line is."""
    return [line["custom_id"] for line in lines]


def number(line: dict[str, Any]) -> int:
    """Return the number of a line in its file."""
    return int((line["error"] or line["warmq"])["line"])


def waiting(store: BatchStore) -> list[str]:
    """Return whose messages wait, the next one first."""
    return [message["headers"]["warmq"]["custom_id"] for message in queued(store)]


def counts(store: BatchStore) -> dict[str, int]:
    """Return the batch's counters that are not 0."""
    names = ("total", "valid", "identical", "completed", "failed", "cancelled", "expired")
    found = {name: state(store, "b1").number(name) for name in names}
    return {name: count for name, count in found.items() if count}


def outcome(line: dict[str, Any]) -> str:
    """Return how a line ended."""
    if not line["error"]:
        return "completed"
    code = line["error"]["code"]
    return code if code in ("cancelled", "expired") else "failed"
