"""Prints batches, requests and tables, as text or as JSON."""

import datetime as dt
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click
import orjson

from contract.batch import Batch
from contract.failures import failures_of, failures_text
from contract.index import leader_of
from contract.naming import DEFAULT_TENANT
from contract.redis import keys
from contract.redis.announced_servers import SharedServer
from contract.redis.batches import BatchStore
from contract.redis.failures import FailedCode
from contract.results import OUTCOMES, one_line, outcome_of, read_meta, result_line
from producer.cli.context import Exit
from producer.cli.marks import MARKS, level_of
from producer.cli.progress import CANCELLED_RUN, RUN_GOES_ON, tell, waits_for_run
from producer.queue_workers import clock_text, left_text, server_text
from producer.request_reads import RequestReads, state_at
from producer.stalls import Stall
from producer.submit.run_again import program_input
from producer.webhook_state import WebhookState

#: Text about a run that --stop-after-failures has stopped.
STOPPED_RUN_GOES_ON = (
    "The same `producer run` goes on where it stopped, also without --stop-after-failures or with "
    "another limit."
)
#: The number of ended requests in the reason of a stop (contract/lua/failures.lua).
_ENDED_AT_STOP = re.compile(r"stopped: \d+ of (\d+) ")
#: Pattern of the invisible characters that join emoji, or keep letters apart.
_JOINERS = re.compile("([\u200c\u200d])")


def put_json(value: Any, *, err: bool = False) -> None:
    """Print a JSON document on one line, to stdout or, with `err`, to stderr."""
    click.echo(one_line(orjson.dumps(value)).decode(), err=err)


def put_json_list(values: Iterable[Any]) -> None:
    """Print a JSON list on one line, without waiting for all its values."""
    separator = "["
    for value in values:
        click.echo(separator + one_line(orjson.dumps(value)).decode(), nl=False)
        separator = ","
    click.echo("]" if separator == "," else "[]")


def iso_time(ms: str | None) -> str | None:
    """Return milliseconds since 1970 as ISO 8601 text; None for None or ''."""
    return dt.datetime.fromtimestamp(int(ms) / 1000, dt.UTC).isoformat() if ms else None


def batch_json(batch: Batch) -> dict[str, Any]:
    """Return the JSON object of a batch for `--json`; times are ISO 8601 in UTC."""
    prompt, completion = batch.number("prompt_tokens"), batch.number("completion_tokens")
    total = batch.number("total")
    return {
        "id": batch.id,
        "object": "warmq.batch",
        "status": batch.status,
        "model": batch.fields.get("model") or None,
        "queue": batch.fields.get("queue"),
        "queues": batch.queues,
        "tenant": batch.tenant,
        "input_file": batch.fields.get("input"),
        "created_at": iso_time(batch.created),
        "expires_at": iso_time(batch.fields.get("deadline")),
        "finished_at": iso_time(batch.fields.get("finished_at")),
        "request_counts": {"total": total}
        | {name: batch.number(name) for name in OUTCOMES}
        | {"in_progress": total - batch.terminal}
        | ({"identical": batch.number("identical")} if batch.dedupe else {})
        | ({"cached": cached} if (cached := batch.number("cached")) else {}),
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        },
        "seconds": batch.seconds,
        "expected": batch.expected,
        "lines_read": batch.number("cursor"),
        "reason": batch.fields.get("reason") or None,
        "failures": [{"code": one.code, "count": one.count} for one in failures_of([batch])],
        "cut": batch.number("cut"),
        "stop_after_failures": batch.fields.get("stop_after") or None,
    }


def stall_json(stall: Stall) -> dict[str, Any]:
    """Return the JSON object of a stall."""
    message, remedy = stall.sentence(), stall.advice()
    return {
        "code": stall.code, "message": message, "remedy": remedy, "passing": stall.passing,
    }  # fmt: skip


def print_batch(
    batch: Batch,
    workers: str | None = None,
    left_s: float | None = None,
    stalls: Iterable[Stall] = (),
    webhook: WebhookState | None = None,
    servers: Iterable[SharedServer] = (),
    failures: Iterable[FailedCode] = (),
) -> None:
    """Print a batch as text, with its queue's workers, seconds left, and what else is given."""
    state = batch_json(batch)
    usage = state["usage"]
    retries = ", with retries" if batch.number("retried") else ""
    put_rows({
        "batch": batch.id,
        "status": state["status"],
        "reason": state["reason"],
        "requests": (_counts(state) or "none yet") + _unread_text(batch),
        "failures": _failure_rows(batch, failures) or None,
        "cut": _cut_text(batch) or None,
        "stops at": (limit := state["stop_after_failures"])
        and f"{limit} {'failure' if limit == '1' else 'failures'}",
        "tokens": f"{usage['prompt_tokens']} prompt, {usage['completion_tokens']} completion"
        f"{retries}",
        "left": None if left_s is None else f"about {left_text(left_s)}",
        "took": None if batch.shown_s is None else _took(batch.shown_s) + retries,
        "expected": _expected(batch.expected),
        "queue": ", ".join(batch.queues),
        "tenant": None if batch.tenant == DEFAULT_TENANT else batch.tenant,
        "workers": workers,
        "servers": "; ".join(map(server_text, servers)) or None,
        "file": state["input_file"],
        "created": state["created_at"],
        "deadline": state["expires_at"],
        "finished": state["finished_at"],
        "webhook": webhook and _webhook_text(webhook),
    })  # fmt: skip
    stalls = list(stalls)
    _print_stalls(stalls)
    if batch.is_run and batch.stopped:
        click.echo(f"\n{STOPPED_RUN_GOES_ON}")
    elif batch.is_run and not batch.finished:
        click.echo(f"\n{waits_for_run(batch) or RUN_GOES_ON}")
    elif batch.is_run and not batch.complete:
        click.echo(f"\n{CANCELLED_RUN}")
    if not batch.sealed and not any(stall.code == "submit_stopped" for stall in stalls):
        lines = state["lines_read"]
        click.echo(f"\nNot submitted to its end ({lines} lines so far). The same `producer submit`")
        click.echo(f"with --batch-id {batch.id} goes on where it stopped.")


def _print_stalls(stalls: Iterable[Stall]) -> None:
    for stall in stalls:
        mark = MARKS[level_of(stall)]
        click.echo(f"\n{mark} {printable(stall.sentence())}: {stall.advice()}")


def _unread_text(batch: Batch) -> str:
    """Return about how many lines a run will queue later; '' if none."""
    unread = 0 if batch.finished else batch.number("unread")
    return f"; about {unread} more are not queued yet" if unread else ""


def _after_stop(batch: Batch) -> str:
    """Return how many requests ended after a stop, whose reason does not count them; or ''."""
    found = _ENDED_AT_STOP.match(batch.fields.get("reason", "")) if batch.stopped else None
    later = batch.done - int(found[1]) if found and not batch.is_run else 0
    return f" ({later} of them ended after the stop)" if later > 0 else ""


def _took(seconds: float) -> str:
    """Return the time that a batch took as text."""
    return f"{seconds:.3g} s" if seconds < 1 else clock_text(seconds)


def webhook_json(webhook: WebhookState | None) -> dict[str, Any] | None:
    """Return the JSON object of a batch's webhook for `--json`."""
    return (
        None
        if webhook is None
        else {
            "url": webhook.url,
            "state": webhook.state,
            "tried_at": iso_time(webhook.tried_ms),
            "problem": webhook.problem,
            "next_try_at": iso_time(webhook.next_try_ms),
        }
    )


def _webhook_text(webhook: WebhookState) -> str:
    """Return a text with the URL, the state and the tries of a batch's webhook."""
    state = {"waiting": "at the batch's end", "given_up": "given up"}.get(webhook.state)
    parts = [
        state or webhook.state,
        f"last try {iso_time(webhook.tried_ms)}" if webhook.tried_ms else "",
        webhook.problem or "",
        f"next try {iso_time(webhook.next_try_ms)}" if webhook.next_try_ms else "",
    ]
    return f"{webhook.url}: {'; '.join(filter(None, parts))}"


def _failure_rows(batch: Batch, failures: Iterable[FailedCode]) -> list[str]:
    """Return the counts of failures, and a text about the first ones of each error code."""
    if not (counts := failures_text(batch) + _after_stop(batch)):
        return []
    first = [
        f"line {one.line}, custom_id {one.custom_id}: {failed.code}: {one.message}"
        for failed in failures
        for one in failed.first
    ]
    return [counts, *first]


def _expected(expected: dict[str, Any] | None) -> str | None:
    """Return a text with the tokens and time that the submit expected."""
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
    """Print a line for each name and value, except None values; a list takes several lines."""
    width = max(map(len, named))
    for name, value in named.items():
        if value is not None:
            first, *more = value if isinstance(value, list) else [value]
            click.echo(f"{name:<{width}}  {printable(first)}")
            for text in more:
                click.echo(f"{'':<{width}}  {printable(text)}")


def request_state(store: BatchStore, batch: Batch, custom_id: str) -> dict[str, Any]:
    """Return the JSON object of a request; `result` is its line in `producer results`."""
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
        return state | _in_progress(store, batch, request_id)
    else:
        state["status"] = "result_expired"
    state["result"] = orjson.loads(result_line(own_id, custom_id, line, raw, leader).json)
    return state


def _in_progress(store: BatchStore, batch: Batch, request_id: str) -> dict[str, Any]:
    """Return who has a request, as a gateway's page shows it, and how often it was delivered."""
    reads = RequestReads.using(store)
    holders = reads.holders()
    found = reads.request(batch, request_id, holders)
    worker = found.worker if found else ""
    return {
        "running": state_at(holders.get(worker)) != "waiting",
        "worker": worker or None,
        "attempts": found.deliveries if found else 0,
    }


def print_request(state: dict[str, Any], stalls: Iterable[Stall] = ()) -> None:
    """Print a request as text, with what it waits for, and its result as JSON."""
    unnamed = ("object", "timing", "result", "running")
    rows = {name: value for name, value in state.items() if name not in unnamed}
    if "running" in state:
        what = "a worker runs it" if state["running"] else "it waits"
        rows["status"] = f"in_progress: {what}"
    if state["timing"]:
        rows["timing"] = ", ".join(f"{name} {value}" for name, value in state["timing"].items())
    put_rows(rows)
    _print_stalls(stalls)
    if state["result"] is not None:
        put_json(state["result"])


def printable(value: object) -> str:
    """Return text without control characters, which could change the terminal's state.

    The joiners of emoji stay, if the terminal's encoding has them.
    """
    text = str(value)
    if text.isprintable():
        return text
    parts = _JOINERS.split(text) if _has_joiners(getattr(sys.stdout, "encoding", None)) else [text]
    return "".join(
        part if part.isprintable() or _JOINERS.fullmatch(part) else repr(part)[1:-1]
        for part in parts
    )


def _has_joiners(encoding: str | None) -> bool:
    try:
        "\u200d".encode(encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def size_text(size: float) -> str:
    """Return a number of bytes as text in a suitable unit."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"


def print_columns(rows: Iterable[Sequence[str]]) -> None:
    """Print a table with aligned columns; the first row is the heading."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        click.echo("  ".join(cells).rstrip())


def print_end(batch: Batch) -> Exit:
    """Print how a batch ended; return the exit status for it."""
    tell(f"{batch.id}: {batch.status}, {_counts(batch_json(batch)) or 'no requests'}")
    if text := failures_text(batch):
        tell(f"{batch.id}: {text}")
    if batch.stopped:
        tell(f"{batch.id}: {batch.fields['reason']}")
        tell_way_on(batch)
    all_completed = batch.number("completed") == batch.number("total")
    return Exit.ALL_WELL if all_completed else Exit.SOME_FAILED


def tell_way_on(batch: Batch) -> None:
    """Print how a batch or run that was stopped goes on."""
    if batch.is_run:
        tell(f"{batch.id}: {STOPPED_RUN_GOES_ON}")
        return
    tell(
        f"{batch.id}: `producer retry {batch.id} --include cancelled` goes on, and stops at the "
        "same limit; the same submit goes on with another --stop-after-failures, or without it"
    )


def tell_cut(batch: Batch) -> None:
    """Print how many answers ended at max_tokens, and the command that runs them again."""
    if text := _cut_text(batch):
        tell(f"{batch.id}: {text}")


def _cut_text(batch: Batch) -> str:
    file = " FILE" if batch.fields.get("input") == "-" else ""
    remedy = f"producer retry {batch.id}{file} --cut --set max_tokens=N"
    if program_input(batch):
        remedy = 'retry_cut({"max_tokens": N}) of the Python client'
    return cut_text(batch.number("cut"), remedy)


def cut_text(count: int, remedy: str) -> str:
    """Return a text about answers that ended at max_tokens; '' if there are none."""
    cut = f"{count:,} {'answer was' if count == 1 else 'answers were'} cut at max_tokens"
    return f"{cut}: {remedy}" if count else ""


def written_json(
    output: str | None, errors_file: str | Path | None, completed: int, failed: int
) -> dict[str, Any]:
    """Return the files and numbers of results for `--json`; the output `-` is stdout."""
    return {
        "output": None if output == "-" else output,
        "errors_file": str(errors_file) if errors_file and failed else None,
        "request_counts": {"completed": completed, "failed": failed},
    }
