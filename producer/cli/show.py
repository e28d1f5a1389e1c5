"""Prints batches, requests and dead letters: for people, or as JSON on stdout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import click
import orjson

from contract.batch import Batch
from contract.redis import keys
from contract.redis.batches import BatchStore
from contract.redis.dead_letters import DeadLetter
from contract.results import outcome_of, read_meta, result_line

#: Lines of a long table that are aligned with each other.
PAGE = 500


def json_text(value: Any) -> str:
    """Return a value as JSON on one line."""
    return orjson.dumps(value).decode()


def put_json(value: Any) -> None:
    """Print one JSON document on a line of its own."""
    click.echo(json_text(value))


def put_json_list(values: Iterable[Any]) -> None:
    """Print a JSON list on one line, each value as it comes."""
    separator = "["
    for value in values:
        click.echo(separator + json_text(value), nl=False)
        separator = ","
    click.echo("]" if separator == "," else "[]")


def batch_table(batch: Batch, workers: str | None = None) -> None:
    """Print one batch for people, and what its queue's workers do."""
    state = batch.as_json()
    counts, usage = state["request_counts"], state["usage"]
    requests = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    rows = {
        "batch": batch.id,
        "status": state["status"],
        "reason": state["reason"],
        "requests": requests or "none yet",
        "tokens": f"{usage['prompt_tokens']} prompt, {usage['completion_tokens']} completion",
        "queue": state["queue"],
        "workers": workers,
        "file": state["input_file"],
        "created": state["created_at"],
        "deadline": state["expires_at"],
        "finished": state["finished_at"],
    }
    _rows(rows)
    if not batch.sealed:
        lines = state["lines_read"]
        click.echo(f"\nNot submitted to its end ({lines} lines so far). The same `producer submit`")
        click.echo(f"with --batch-id {batch.id} goes on where it stopped.")


def _rows(rows: dict[str, Any]) -> None:
    width = max(map(len, rows))
    for name, value in rows.items():
        if value is not None:
            click.echo(f"{name:<{width}}  {_harmless(value)}")


def request_state(store: BatchStore, batch: Batch, custom_id: str) -> dict[str, Any]:
    """Return what is known of one request; its `result` is the line `results` would print.

    Raises:
        BatchConflict: if the batch has no such request.
    """
    (line, custom_id, _), request_id = store.find(batch, custom_id)
    raw = store.results([request_id])[0]
    state: dict[str, Any] = {
        "batch_id": batch.id,
        "custom_id": custom_id,
        "line": line,
        "request_id": request_id,
        "result_key": keys.result_key(request_id),
        "status": "in_progress",
        "timing": None,
        "result": None,
    }
    if raw is not None:
        meta = read_meta(raw)
        state["status"] = outcome_of(meta)
        state["timing"] = (meta.get("warmq") or {}).get("timing")
    elif not batch.finished:
        state["attempts"] = store.returns(request_id) + 1
        return state
    state["result"] = orjson.loads(result_line(request_id, custom_id, line, raw).json)
    return state


def request_table(state: dict[str, Any]) -> None:
    """Print one request for people; the stored line last."""
    rows = {name: value for name, value in state.items() if name not in ("timing", "result")}
    if state["timing"]:
        rows["timing"] = ", ".join(f"{name} {value}" for name, value in state["timing"].items())
    _rows(rows)
    if state["result"] is not None:
        put_json(state["result"])


def batch_list(batches: Sequence[Batch]) -> None:
    """Print all batches, one a line."""
    rows = [("BATCH", "STATUS", "DONE", "FAILED", "CREATED")]
    for batch in batches:
        done = f"{batch.terminal}/{batch.number('total')}"
        created = str(batch.as_json()["created_at"])[:19]
        rows.append((batch.id, batch.status, done, str(batch.number("failed")), created))
    _columns(rows)


def _harmless(value: object) -> str:
    """Return a text that only shows on a terminal: a custom_id could move its cursor, or worse."""
    text = str(value)
    return text if text.isprintable() else repr(text)[1:-1]


def _columns(rows: Iterable[Sequence[str]]) -> None:
    rows = [[_harmless(cell) for cell in row] for row in rows]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        click.echo("  ".join(cells).rstrip())


def letter_json(letter: DeadLetter, message: bytes) -> dict[str, Any]:
    """Return a dead letter with its message, which holds the prompt."""
    return {**letter, "message": message.decode(errors="replace")}


def letter_list(letters: Iterable[DeadLetter]) -> None:
    """Print dead letters, one a line, as they come; columns are aligned within a page."""
    rows = [("ID", "BATCH", "CUSTOM_ID", "REASON")]
    for letter in letters:
        custom_id = letter["custom_id"] or "-"
        rows.append((letter["id"], letter["batch_id"] or "-", custom_id, letter["reason"]))
        if len(rows) > PAGE:
            _columns(rows)
            rows.clear()
    _columns(rows)
