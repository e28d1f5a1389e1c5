"""Hostile requests as lines of batches, and how each line ended."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import openai
import orjson
from kit.engines.run_batch_lines import NAME
from kit.hostile.hostile_request import Hostile

from demo.stack import eventually


@dataclass
class Sent:
    """A batch of hostile lines: its id, and which request is in which line."""

    id: str
    rows: Sequence[Hostile]


def send_as_batches(client: openai.OpenAI, requests: Sequence[Hostile]) -> list[Sent]:
    """Send each request as a line, in a batch for each URL; the custom_id is its number there.

    A line that is no JSON object refuses its whole file (docs/reference/gateway.md), so each has
    its own.
    """
    sent = []
    good = [each for each in requests if _is_object(each.line(NAME, "0"))]
    alone = [[each] for each in requests if each not in good]
    for rows in [*(_of_url(good, url) for url in dict.fromkeys(e.url for e in good)), *alone]:
        url = rows[0].url
        content = b"\n".join(each.line(NAME, str(n)) for n, each in enumerate(rows))
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        batch: Any = client.batches.create
        made = batch(input_file_id=file.id, endpoint=url, completion_window="1h")
        sent.append(Sent(made.id, rows))
    return sent


def _of_url(requests: Sequence[Hostile], url: str) -> list[Hostile]:
    return [each for each in requests if each.url == url]


def _is_object(line: bytes) -> bool:
    with suppress(orjson.JSONDecodeError):
        return isinstance(orjson.loads(line), dict)
    return False


def ends_of(client: openai.OpenAI, sent: Sent, within_s: float) -> dict[str, list[str]]:
    """Wait for a batch's end; return, for each request by name, what is wrong with its ends.

    A line that ended twice has both; one that never ended has "lost".
    """

    def look() -> Any:
        with suppress(openai.APIStatusError, openai.APIConnectionError):
            batch = client.batches.retrieve(sent.id)
            if batch.status in ("completed", "failed", "expired", "cancelled"):
                return batch
        return None

    try:
        batch = eventually(look, within_s, every_s=0.5)
    except TimeoutError:
        return {each.name: [f"its batch has no end within {within_s:g} s"] for each in sent.rows}
    found: dict[str, list[str]] = {each.name: [] for each in sent.rows}
    unnamed = 0
    for file_id in (batch.output_file_id, batch.error_file_id):
        for raw in client.files.content(file_id).content.splitlines() if file_id else ():
            line = orjson.loads(raw)
            if line["custom_id"] is None or not line["custom_id"].isdecimal():
                unnamed += 1
                continue
            row = sent.rows[int(line["custom_id"])]
            response = line["response"] or {}
            found[row.name].append(row.fault(int(response.get("status_code") or 400)))
    for each in (batch.errors.data or []) if batch.errors else []:
        if each.line is not None:
            found[sent.rows[each.line - 1].name].append("")
    lost = [name for name, ends in found.items() if not ends]
    for name in lost[unnamed:] if batch.status == "completed" else lost:
        found[name].append(f"lost: the batch is {batch.status}, {batch.errors}"[:300])
    return {
        name: (["ended twice"] if len(ends) > 1 else []) + [e for e in ends if e]
        for name, ends in found.items()
    }
