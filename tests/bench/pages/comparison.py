"""The tables of docs/evidence/comparison.md: warmq and what a user would pick instead."""

from __future__ import annotations

from typing import Any

from bench.common import report

PAGE = report.ROOT / "docs/evidence/comparison.md"
PARTS = ("alternatives", "queues")
BEGIN, END = "<!-- comparison: written by `run.py --write-docs` -->", "<!-- end of comparison -->"
#: Figures of part `queues`: name, what, unit.
QUEUE_ROWS = (
    ("occupancy_64", "slots full under a backlog, N = 64", ""),
    ("occupancy_256", "the same, N = 256", ""),
    ("worker_us_per_request", "worker CPU per request, N = 256", " µs"),
    ("commands_per_request", "Redis commands per request, N = 256, inside scripts too", ""),
    ("ceiling_per_s", "requests/s with a zero-latency engine", ""),
    (
        "submit_per_s",
        "requests submitted per second; warmq: a file's lines, with the command's start",
        "",
    ),
    ("results_per_s", "results read per second by the queue's client; warmq the same way", ""),
    ("idle_ms_p50", "idle: sending → result in Redis, p50", " ms"),
    ("idle_ms_p99", "the same, p99", " ms"),
    ("occupancy_16", "slots full, N = 16", ""),
    ("occupancy_512", "slots full, N = 512", ""),
    ("occupancy_1024", "slots full, N = 1,024", ""),
)


def _against_bar(found: dict[str, Any], figure: str) -> str:
    """Return a ratio with its bar, and whether it was missed."""
    reached, bar = found["reached"][figure], found["bars"].get(figure)
    text = report.shown(reached)
    if bar is None:
        return text
    return f"{text}, bar ≥ {bar:g}" + (" **missed**" if reached["median"] < bar else "")


def _not_run(found: dict[str, Any]) -> list[str]:
    return [
        f"Could not run: {name}: {' '.join(why.split())}\n"
        for name, why in found["not_run"].items()
    ]


def ways_table(found: dict[str, Any]) -> list[str]:
    """Return one row a way, then the files, then what could not run."""
    lines = [
        f"One file of {found['requests']} chats of {found['tokens_each']} tokens; the wall is "
        "without the start of what stays warm.",
        "",
        "| way | tokens/s while generating | wall, s | start, s | warmq ÷ it, same round |",
        "| --- | --- | --- | --- | --- |",
    ]
    for key, name in found["names"].items():
        rate, wall = (
            report.shown(found["reached"][f"{key}_{what}"]) for what in ("tokens_per_s", "wall_s")
        )
        if fewer := found["fewer"].get(key):
            wall += f", {fewer} chats"
        start = found["start_s"][key] or "in the wall"
        ratio = "" if key == "warmq" else _against_bar(found, f"warmq_to_{key}")
        lines.append(f"| {name} | {rate} | {wall} | {start} | {ratio} |")
    files, reached = found["files"], found["reached"]
    lines += [
        "",
        f"{files['number']} files of {files['lines']:,} lines one after another, "
        f"{files['tokens_each']} tokens an answer, seconds a file: warmq's warm worker "
        f"{report.shown(reached['warmq_file_s'])}, `vllm run-batch` "
        f"{report.shown(reached['run_batch_file_s'])}; run-batch ÷ warmq "
        f"{_against_bar(found, 'run_batch_files_to_warmq')}.",
        "",
    ]
    return lines + _not_run(found)


def queues_table(found: dict[str, Any]) -> list[str]:
    """Return one column a queue."""
    reached = found["reached"]
    known = [
        name for name in ("warmq", "celery", "taskiq", "arq") if f"{name}_idle_ms_p50" in reached
    ]
    titles = {"warmq": "warmq", "celery": "stock Celery, threads"} | found["versions"]
    lines = [
        "| simulated engine, mean 200 ms | " + " | ".join(titles[name] for name in known) + " |",
        "| --- |" + " --- |" * len(known),
    ]
    for figure, what, unit in QUEUE_ROWS:
        cells = []
        for name in known:
            value = reached.get(f"{name}_{figure}")
            bar = found["bars"].get(f"{name}_{figure}")
            missed = bar is not None and value["median"] < bar
            cell = report.shown(value, unit) if value else ""
            cells.append(cell + (f", bar ≥ {bar:g}" if bar else "") + " **missed**" * missed)
        lines.append(f"| {what} | " + " | ".join(cells) + " |")
    return [*lines, "", *_not_run(found)]


def put_in(page: str) -> str:
    """Return the page with the tables between their marks; unchanged where nothing was measured."""
    lines: list[str] = []
    for part, table in zip(PARTS, (ways_table, queues_table), strict=True):
        if (found := report.load(part)) is not None:
            lines += table(found)
    if not lines:
        return page
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n" + "\n".join(lines).strip() + f"\n\n{END}{tail}"
