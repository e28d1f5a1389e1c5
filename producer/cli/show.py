"""Prints batches, requests, dead letters and endings: for people, or as JSON on stdout."""

import datetime as dt
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click
import orjson

from contract.batch import Batch
from contract.index import leader_of
from contract.naming import DEFAULT_TENANT
from contract.redis import keys
from contract.redis.batches import BatchStore
from contract.redis.dead_letters import DeadLetter
from contract.results import OUTCOMES, one_line, outcome_of, read_meta, result_line
from producer.cli.context import Exit
from producer.cli.progress import counted, tell
from producer.queue_workers import clock_text

#: Lines of a long table that are aligned with each other.
PAGE = 500


def put_json(value: Any, *, err: bool = False) -> None:
    """Print one JSON document on a line of its own, on stdout or, with `err`, stderr."""
    click.echo(one_line(orjson.dumps(value)).decode(), err=err)


def put_json_list(values: Iterable[Any]) -> None:
    """Print a JSON list on one line, each value as it comes."""
    separator = "["
    for value in values:
        click.echo(separator + one_line(orjson.dumps(value)).decode(), nl=False)
        separator = ","
    click.echo("]" if separator == "," else "[]")


def iso_time(ms: str | None) -> str | None:
    """Return ms since 1970 as text; None for none."""
    return dt.datetime.fromtimestamp(int(ms) / 1000, dt.UTC).isoformat() if ms else None


def batch_json(batch: Batch) -> dict[str, Any]:
    """Return a batch as `--json` shows it; times are ISO 8601 in UTC."""
    prompt, completion = batch.number("prompt_tokens"), batch.number("completion_tokens")
    total = batch.number("total")
    return {
        "id": batch.id,
        "object": "warmq.batch",
        "status": batch.status,
        "model": batch.fields.get("model") or None,
        "queue": batch.fields.get("queue"),
        "tenant": batch.tenant,
        "input_file": batch.fields.get("input"),
        "created_at": iso_time(batch.created),
        "expires_at": iso_time(batch.fields.get("deadline")),
        "finished_at": iso_time(batch.fields.get("finished_at")),
        "request_counts": {"total": total}
        | {name: batch.number(name) for name in OUTCOMES}
        | {"in_progress": total - batch.terminal}
        | ({"identical": batch.number("identical")} if batch.dedupe else {}),
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        },
        "seconds": batch.seconds,
        "expected": batch.expected,
        "lines_read": batch.number("cursor"),
        "reason": batch.fields.get("reason"),
    }


def batch_table(batch: Batch, workers: str | None = None, left_s: float | None = None) -> None:
    """Print one batch for people, what its queue's workers do, and how long it still takes."""
    state = batch_json(batch)
    usage = state["usage"]
    rows = {
        "batch": batch.id,
        "status": state["status"],
        "reason": state["reason"],
        "requests": _counts(state) or "none yet",
        "tokens": f"{usage['prompt_tokens']} prompt, {usage['completion_tokens']} completion",
        "left": None if left_s is None else f"about {clock_text(left_s)}",
        "took": None if batch.seconds is None else clock_text(batch.seconds),
        "expected": _expected(batch),
        "queue": state["queue"],
        "tenant": None if batch.tenant == DEFAULT_TENANT else batch.tenant,
        "workers": workers,
        "file": state["input_file"],
        "created": state["created_at"],
        "deadline": state["expires_at"],
        "finished": state["finished_at"],
    }
    put_rows(rows)
    if not batch.sealed:
        lines = state["lines_read"]
        click.echo(f"\nNot submitted to its end ({lines} lines so far). The same `producer submit`")
        click.echo(f"with --batch-id {batch.id} goes on where it stopped.")


def _expected(batch: Batch) -> str | None:
    """Return what the submit expected, to stand below what came."""
    expected = batch.expected
    if expected is None:
        return None
    parts = [f"about {expected['prompt_tokens']} prompt"]
    if expected["completion_tokens"] is not None:
        parts.append(f"{expected['completion_tokens']} completion")
    if expected["seconds"] is not None:
        parts.append(f"in {clock_text(expected['seconds'])}")
    return ", ".join(parts)


def _counts(state: dict[str, Any]) -> str:
    counts = state["request_counts"]
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count)


def put_rows(named: dict[str, Any]) -> None:
    """Print names and values, one a line; what is None is left out."""
    width = max(map(len, named))
    for name, value in named.items():
        if value is not None:
            click.echo(f"{name:<{width}}  {harmless(value)}")


def request_state(store: BatchStore, batch: Batch, custom_id: str) -> dict[str, Any]:
    """Return what is known of one request; its `result` is the line `results` would print.

    Raises:
        BatchConflict: if the batch has no such request.
    """
    entry, own_id = store.find(batch, custom_id)
    line, custom_id, _ = entry[:3]
    leader = leader_of(entry)
    request_id = leader or own_id
    raw = store.results([request_id])[0]
    state: dict[str, Any] = {
        "object": "warmq.request",
        "batch_id": batch.id,
        "custom_id": custom_id,
        "line": line,
        "request_id": request_id,
        "result_key": keys.result_key(request_id),
        "status": "in_progress",
        "timing": None,
        "result": None,
    }
    if leader:
        state["same_as"] = store.custom_id_of(batch, leader)
    if raw is not None:
        meta = read_meta(raw)
        state["status"] = outcome_of(meta)
        state["timing"] = (meta.get("warmq") or {}).get("timing")
    elif not batch.finished:
        state["attempts"] = store.returns(request_id) + 1
        return state
    else:
        state["status"] = "result_expired"
    state["result"] = orjson.loads(result_line(own_id, custom_id, line, raw, leader).json)
    return state


def request_table(state: dict[str, Any]) -> None:
    """Print one request for people; the stored line last."""
    hidden = ("object", "timing", "result")
    rows = {name: value for name, value in state.items() if name not in hidden}
    if state["timing"]:
        rows["timing"] = ", ".join(f"{name} {value}" for name, value in state["timing"].items())
    put_rows(rows)
    if state["result"] is not None:
        put_json(state["result"])


def batch_list(batches: Sequence[Batch]) -> None:
    """Print all batches, one a line."""
    rows = [("BATCH", "STATUS", "DONE", "FAILED", "CREATED")]
    for batch in batches:
        done = f"{batch.terminal}/{batch.number('total')}"
        created = str(iso_time(batch.created))[:19]
        rows.append((batch.id, batch.status, done, str(batch.number("failed")), created))
    columns(rows)


def harmless(value: object) -> str:
    """Return text without control characters, which could change the terminal's state."""
    text = str(value)
    return text if text.isprintable() else repr(text)[1:-1]


def size_text(size: int) -> str:
    """Return bytes in a unit that suits them."""
    number = float(size)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.3g} TiB"


def columns(rows: Iterable[Sequence[str]]) -> None:
    """Print a table, its columns aligned; the first row is the heading."""
    rows = [[harmless(cell) for cell in row] for row in rows]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        click.echo("  ".join(cells).rstrip())


def letter_list(letters: Iterable[DeadLetter]) -> None:
    """Print dead letters, one a line, as they come; columns are aligned within a page."""
    rows = [("ID", "BATCH", "CUSTOM_ID", "REASON")]
    for letter in letters:
        custom_id = letter["custom_id"] or "-"
        rows.append((letter["id"], letter["batch_id"] or "-", custom_id, letter["reason"]))
        if len(rows) > PAGE:
            columns(rows)
            rows.clear()
    columns(rows)


def ended(batch: Batch) -> Exit:
    """Tell how a batch ended; return the exit status for it."""
    tell(f"{batch.id}: {batch.status}, {_counts(batch_json(batch)) or 'no requests'}")
    all_well = batch.number("completed") == batch.number("total")
    return Exit.ALL_WELL if all_well else Exit.SOME_FAILED


def written_json(
    output: str | None, errors_file: str | Path | None, completed: int, failed: int
) -> dict[str, Any]:
    """Return where results were written and how many, as `--json` shows it; `-` is stdout."""
    return {
        "output": None if output == "-" else output,
        "errors_file": str(errors_file) if errors_file and failed else None,
        "request_counts": {"completed": completed, "failed": failed},
    }


def changed(batch_id: str, what: str, count: int, *, as_json: bool) -> None:
    """Tell how many requests of a batch a command has changed."""
    tell(f"{batch_id}: {counted(count, 'request')} {what}")
    if as_json:
        put_json({"id": batch_id, "requests": count})
