"""Batches over HTTP, by the SDK: upload, wait for the end, read both files."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import openai
import orjson

ENDED = ("completed", "failed", "expired", "cancelled")


def request(custom_id: str, model: str = "small", **body: Any) -> dict[str, Any]:
    """Return a line that asks a chat for its own custom_id."""
    asked = {"model": model, "messages": [{"role": "user", "content": custom_id}]} | body
    return {
        "custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": asked
    }  # fmt: skip


def upload(client: openai.OpenAI, lines: list[dict[str, Any]] | bytes) -> str:
    """Upload a file of lines; return its id."""
    data = lines if isinstance(lines, bytes) else b"\n".join(map(orjson.dumps, lines))
    return client.files.create(file=("in.jsonl", data), purpose="batch").id


def ended(client: openai.OpenAI, batch_id: str, within_s: float = 30) -> Any:
    """Wait for a batch's end; return it.

    Raises:
        AssertionError: it has not ended in time; with what it is.
    """
    until = time.monotonic() + within_s
    while (batch := client.batches.retrieve(batch_id)).status not in ENDED:
        assert time.monotonic() < until, batch
        time.sleep(0.1)  # not a synchronisation: it is asked until it has ended
    return batch


def lines_of(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """Return the lines of a file, none for no file."""
    if file_id is None:
        return []
    content = client.files.content(file_id).content
    assert content.endswith(b"\n"), content[-100:]
    return [orjson.loads(line) for line in content.splitlines()]


def results(client: openai.OpenAI, batch: Any) -> Counter[str]:
    """Return how often each custom_id is in both files together."""
    both = [lines_of(client, name) for name in (batch.output_file_id, batch.error_file_id)]
    return Counter(line["custom_id"] for lines in both for line in lines)
