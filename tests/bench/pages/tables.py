"""Writes the tables of docs/evidence/measurements.md from tests/bench/results/*.json."""

from __future__ import annotations

from typing import Any

from bench.common import report
from bench.pages import comparison, plots, qa_table

PAGE = report.ROOT / "docs/evidence/measurements.md"
BEGIN, END = "<!-- figures: written by `run.py --write-docs` -->", "<!-- end of figures -->"

#: What is shown: part, figure, its name, unit, whether more is better, what limits it.
ROWS: tuple[tuple[str, str, str, str, str], ...] = (
    ("throughput", "queue_to_bare", "tokens/s through the queue ÷ bare engine", "",
     "CPU of this process on two cores that the engine needs too"),
    ("throughput", "classes_to_bare", "of that: serving classes without the queue ÷ bare", "",
     "vLLM's request, serving and response classes"),
    ("throughput", "bare_tokens_per_s", "bare engine, tokens/s", "", "the model on this CPU"),
    ("throughput", "bare_cpu_us_per_request", "bare, front-end CPU per request", " µs", ""),
    ("throughput", "classes_cpu_us_per_request", "classes, front-end CPU per request", " µs", ""),
    ("throughput", "queue_cpu_us_per_request", "queue, front-end CPU per request", " µs", ""),
    ("overhead", "occupancy_64", "slots full under a backlog, N = 64", "", "nothing of note"),
    ("overhead", "occupancy_256", "slots full under a backlog, N = 256", "",
     "the loop's own delay"),
    ("overhead", "ceiling_per_s", "requests/s with a zero-latency engine", "",
     "one core of Python in the drain's loop"),
    ("overhead", "stepped_worker_us_per_request",
     "worker CPU per request, N = 256 at 1,200/s, ends in steps of 10 ms", " µs",
     "this machine: two rows below"),
    ("overhead", "stepped_engine_alone_us_per_request", "of that: the simulated engine alone",
     " µs", ""),
    ("overhead", "stepped_floor_us_per_request",
     "a loop that promises nothing, same engine and groups (`floor.py`)", " µs", "this machine"),
    ("overhead", "stepped_worker_to_floor", "worker ÷ that loop", "",
     "leases, checks, counters, fenced results"),
    ("overhead", "brisk_worker_us_per_request",
     "worker CPU in steps at four times the rate (50 ms a request)", " µs",
     "a wake-up is shared by more requests"),
    ("overhead", "worker_us_per_request", "worker CPU at 1,200/s, each request ending by itself",
     " µs", "this machine; two fifths the simulated engine"),
    ("overhead", "engine_alone_us_per_request", "of that: the simulated engine alone", " µs", ""),
    ("overhead", "floor_us_per_request", "a loop that promises nothing, the same way", " µs",
     "this machine"),
    ("overhead", "worker_to_floor", "worker ÷ that loop", "", ""),
    ("overhead", "ceiling_worker_us_per_request", "worker CPU per request at the ceiling", " µs",
     "groups of 64 share a POP and a DONE"),
    ("overhead", "redis_us_per_request", "Redis CPU per request, N = 256", " µs",
     "commands inside the scripts; append-only file on"),
    ("overhead", "scripts_per_request", "round trips (scripts) per request, N = 256", "",
     "8 ms linger before a DONE, of those that end alone"),
    ("overhead", "commands_per_request", "Redis commands per request, inside scripts", "", ""),
    ("latency", "wake_ms_p50", "idle: sent → worker has it, p50", " ms",
     "woken by Redis, then POP"),
    ("latency", "wake_ms_p99", "idle: sent → worker has it, p99", " ms", "the scheduler"),
    ("latency", "answer_ms_p50", "idle: sent → result read, whole worker, p50", " ms",
     "three round trips"),
    ("latency", "commit_idle_ms_p50", "idle: engine finished → result in Redis, p50", " ms",
     "one round trip"),
    ("latency", "commit_64_ms_p50", "the same under a backlog, N = 64, p50", " ms", "8 ms linger"),
    ("latency", "commit_256_ms_p50", "the same under a backlog, N = 256, p50", " ms",
     "8 ms linger"),
    ("latency", "commit_256_ms_p99", "the same under a backlog, N = 256, p99", " ms", ""),
    ("latency", "commit_256_stepped_ms_p50", "the same, N = 256, in steps of 10 ms, p50", " ms",
     "what ends together is written at once"),
    ("latency", "overtake_256_ms_p50", "priority 0 overtakes a backlog, N = 256, p50", " ms",
     "waits until half the look-ahead is free"),
    ("observed", "none_again_ceiling", "a worker that nobody looks at ÷ another, at the ceiling",
     "", "noise; 16 cores, as the seven rows below"),
    ("observed", "metrics_ceiling", "/metrics scraped every 5 s ÷ not, requests/s at the ceiling",
     "", ""),
    ("observed", "metrics_steady", "the same, requests/s with 256 full slots", "", ""),
    ("observed", "metrics_cpu", "the same, worker CPU at 1,200/s", "", ""),
    ("observed", "events_cpu", "Celery's task events on ÷ off, worker CPU at 1,200/s", "",
     "50 requests a second are reported"),
    ("observed", "events_ceiling", "the same, requests/s at the ceiling", "",
     "500 requests are reported at once"),
    ("traced", "full_sampled", "traces of 1 % ÷ off, requests/s, N = 256", "", ""),
    ("traced", "ceiling_sampled", "the same at the ceiling", "", "pairs spread: 40 of them"),
    ("fairness", "late_share", "a tenant comes when 100,000 requests wait: its share of tokens", "",
     ""),
    ("fairness", "late_share_error", "that, away from a half", "", "turns of 32 requests"),
    ("fairness", "late_first_answer_in_mean_requests",
     "its first answer after submit, in mean request times", "", "the look-ahead before it"),
    ("fairness", "occupancy", "slots full meanwhile, N = 64", "", ""),
    ("fairness", "worst_share_error",
     "weights 1, 2, 4, tokens 10 times apart: furthest from its share in 10,000 requests", "",
     "turns of 32 requests"),
    ("many_tenants", "many_to_one",
     "a POP of 32: 1,000 tenants of 100 batches ÷ one tenant, one batch", "",
     "a turn that ends in a POP"),
    ("many_tenants", "one_us", "of that: one tenant, Redis' time", " µs", ""),
    ("gateway_online", "occupancy",
     "online by HTTP, 256 connections, 256 slots at 200 ms: slots full", "",
     "each next request waits for the last answer"),
    ("gateway_online", "gateway_us", "of that: gateway CPU per request", " µs",
     "Starlette's and asyncio's calls; a bare server below"),
    ("gateway_online", "bare_us", "the same of a bare Starlette server", " µs", ""),
    ("gateway_online", "over_direct_ms_p50", "added to the drain's own time, p50", " ms", ""),
    ("gateway_online", "over_direct_ms_p99", "the same, p99", " ms", ""),
    ("gateway_streamed", "tokens_to_vllm",
     "32 streamed chats, tiny model on a GPU: tokens/s ÷ `vllm serve`", "",
     "not looked into; vLLM's server is one process"),
    ("gateway_streamed", "first_ms_more_p50", "the same: first text, p50, later by", " ms",
     "the same"),
    ("gateway_beside", "p99_to_idle",
     "online at 10/s with a batch of 100,000: p99 ÷ its p99 alone", "",
     "a chat waits for the look-ahead before it"),
    ("gateway_beside", "occupancy", "slots full meanwhile, N = 256", "", ""),
    ("gateway_carrying", "queued_wall_ratio",
     "200,000 lines looked through and queued ÷ `producer submit`, lines/s", "",
     "a line is read and looked up once more"),
    ("gateway_carrying", "written_wall_ratio", "their files written ÷ `producer results`", "", ""),
    ("gateway_gigabyte", "queued_to_submit",
     "2,000,000 lines, 1.2 GB: created to queued ÷ `producer submit`, lines/s", "",
     "the same"),
    ("gateway_gigabyte", "peak_mb", "upload, batch and output: most memory of any process", " MB",
     ""),
    ("order", "added_time",
     "`submit --order prefix`, 1,000,000 lines of 2 kB: time added, as a share", "", ""),
    ("order", "peak_mb_prefix", "its peak memory", " MB", "keys of a line, numpy"),
    ("scale", "share_1", "1 worker, 256 slots at 200 ms: share of 1,280/s", "", ""),
    ("scale", "share_8", "8 workers: share of 10,240/s", "", "this machine's two cores"),
    ("scale", "share_16", "16 workers: share of 20,480/s", "", "the same"),
    ("scale", "per_s_16", "of that: requests/s", "", ""),
    ("scale", "machine_share_16", "of that: share of both cores", "", ""),
    ("scale", "redis_share_16", "of that: Redis' share of its core", "", ""),
    ("scale", "share_16_at_2_s", "16 workers at 2 s: share of 2,048/s", "", "nothing of note"),
    ("scale", "share_16_at_4_s", "16 workers at 4 s: share of 1,024/s", "", ""),
    ("scale", "model_us_per_request", "Redis CPU: each request", " µs", "the model below"),
    ("scale", "model_us_per_script", "Redis CPU: each script", " µs", ""),
    ("scale", "model_full_at_per_s", "model: one Redis is full at, requests/s", "", ""),
    ("scale", "full_at_per_s", "reached with lean processes, requests/s", "",
     "Redis' core, if its share is near 1"),
    ("scale", "full_redis_share", "of that: Redis' share of its core", "", ""),
    ("scale", "full_us_to_model", "of that: Redis CPU per request ÷ model", "", ""),
    ("size", "submit_s", "1,000,000 lines: submit", " s", "one core of Python"),
    ("size", "drain_s", "the same: drained, zero-latency engine", " s",
     "one core of Python in the drain's loop"),
    ("size", "collect_s", "the same: collected in input order", " s", ""),
    ("size", "delete_s", "the same: deleted", " s", ""),
    ("size", "bytes_to_message", "Redis memory per queued request ÷ its message", "",
     "list nodes, index"),
    ("size", "redis_mb", "Redis' peak memory, 1,000,000 lines", " MB", "the messages"),
    ("size", "worker_growth", "worker's memory after the first 10,000: growth", "", ""),
    ("size", "submit_mb_per_100k", "submit's memory per 100,000 lines, after 250,000", " MB", ""),
    ("size", "collect_mb_per_100k", "results' memory per 100,000 lines", " MB", ""),
    ("size", "submit_redis_us", "Redis CPU per request: submit", " µs", ""),
    ("size", "drain_redis_us", "the same: drained at the ceiling", " µs", ""),
    ("size", "collect_redis_us", "the same: collected", " µs", ""),
    ("size", "window_redis_mb", "`producer run`, windows of 20,000: Redis' peak", " MB",
     "two windows"),
    ("size", "window_peak_growth", "the same: peak of the second half ÷ first", "", ""),
    ("submit", "lines_per_s_100k", "`producer submit`, lines/s with its start", "",
     "one core of Python; ENQUEUE runs meanwhile"),
    ("submit", "lines_per_s_100k_after_start", "the same without the command's start", "", ""),
    ("submit", "lines_per_s_1m", "1,000,000 lines, lines/s", "",
     "beyond 1.2 million ids SQLite finds the doubled ones"),
    ("submit", "parse_line_us", "`parse_line` alone", " µs", "orjson and msgspec"),
    ("submit", "peak_mb_100k", "producer's peak memory, 100,000 lines", " MB",
     "imports, and 32 MB for the ids seen"),
    ("submit", "peak_mb_1m", "producer's peak memory, 1,000,000 lines", " MB",
     "32 MB for the ids seen"),
    ("reuse", "cpu_none_known", "`submit --reuse`, no line known: CPU ÷ without `--reuse`", "",
     "a hash and a look-up for each line"),
    ("reuse", "reused_per_s", "the same, all known: lines/s without the command's start", "", ""),
    ("structured", "fields5_schemas1_queue_to_all",
     "JSON schema of 5 fields: tokens/s through the queue ÷ engine", "", ""),
    ("structured", "fields5_schemas100_queue_to_all", "100 schemas of 5 fields", "", ""),
    ("structured", "fields50_schemas1_queue_to_all", "one of 50 fields", "", ""),
    ("structured", "fields50_schemas100_queue_to_all", "100 of 50 fields", "",
     "each is compiled before the engine compiles it"),
    ("results", "input_lines_per_s", "`producer results`, lines/s, input order", "",
     "one core of Python; Redis works ahead meanwhile"),
    ("results", "input_lines_per_s_after_start", "the same without the command's start", "", ""),
    ("results", "input_lines_per_s_1m", "1,000,000 results, lines/s with the start", "", ""),
    ("results", "completion_lines_per_s", "100,000 in order of completion, with the start", "", ""),
    ("results", "completion_peak_mb", "its peak memory", " MB", ""),
)  # fmt: skip

#: Figures where less is better; a bar is a ceiling there.
LESS = (
    "us", "ms", "mb", "bytes", "growth", "scripts", "error", "answer", "many", "added", "p99",
    "cpu",
)  # fmt: skip
LOOK_AHEAD = "look_ahead_"


def _less_is_better(figure: str) -> bool:
    return any(f"_{unit}_" in f"_{figure}_" for unit in LESS)


def _plain(value: object, unit: str) -> str:
    if not isinstance(value, int | float):
        return str(value or "")
    return (f"{value:,}" if value >= 1000 else f"{value:g}") + unit


def _row(row: tuple[str, str, str, str, str], found: dict[str, Any]) -> str:
    _, figure, name, unit, limit = row
    reached = report.shown(found["reached"].get(figure), unit)
    bar = found["bars"].get(figure)
    shown_bar = ""
    if bar is not None:
        shown_bar = ("≤ " if _less_is_better(figure) else "≥ ") + _plain(bar, unit)
        median = found["reached"].get(figure, {}).get("median")
        if median is not None and (median > bar if _less_is_better(figure) else median < bar):
            reached += " **missed**"
    expected = _plain(found["expected"].get(figure), unit)
    return f"| {name} | {shown_bar} | {expected} | {reached} | {limit} |"


def main_table(parts: dict[str, dict[str, Any]]) -> list[str]:
    """Return the table of figures against bars and predictions."""
    lines = [
        "| what | bar | expected | reached: median (least to greatest, repeats) | what limits it |",
        "| --- | --- | --- | --- | --- |",
    ]
    return lines + [_row(row, parts[row[0]]) for row in ROWS if row[0] in parts]


def look_ahead_table(found: dict[str, Any]) -> list[str]:
    """Return tokens/s by look-ahead, over the median of the round."""
    lines = ["| look-ahead | tokens/s ÷ median of its round |", "| --- | --- |"]
    for figure, value in found["reached"].items():
        if figure.startswith(LOOK_AHEAD):
            ahead = figure.removeprefix(LOOK_AHEAD).partition("_")[0]
            lines.append(f"| {ahead} | {report.shown(value)} |")
    return lines


def provenance(parts: dict[str, dict[str, Any]]) -> list[str]:
    """Return what was measured when, on what, and how busy the machine was."""
    machine = next(iter(parts.values()))["machine"]
    named = {k: v for found in parts.values() for k, v in found["machine"]["versions"].items()}
    versions = ", ".join(f"{name} {version}" for name, version in named.items())
    lines = [
        f"{machine['cores']} cores of {machine['cpu']} (virtual), {machine['memory_gib']} GiB, "
        f"Python {machine['python']}; {versions}.",
        "",
        "| part | date | commit | load average while it ran |",
        "| --- | --- | --- | --- |",
    ]
    for part, found in parts.items():
        loads = [load[0] for load in found["load_average"]]
        lines.append(
            f"| {part} | {found['machine']['date'][:16]} | {found['machine']['commit']} "
            f"| {min(loads)} to {max(loads)} |"
        )
    return lines


def full_note(found: dict[str, Any], h200: dict[str, Any]) -> list[str]:
    """Return in words what the model says one Redis carries; `h200` are the 8B runs."""
    request_us, script_us, full_at = (
        found["reached"][name]["median"]
        for name in ("model_us_per_request", "model_us_per_script", "model_full_at_per_s")
    )
    fleets = [run for run in found["fleets"] if run["latency_s"] < 1]
    largest = max(fleets, key=lambda run: run["workers"])
    per_worker = largest["ideal_per_s"] / largest["workers"]
    scripts = largest["scripts_per_request"]
    full = 1e6 / (request_us + script_us * scripts)
    per_gpu = h200["reached"]["queue_tokens_per_s"]["median"] * h200["requests"] / h200["tokens"]
    return [
        f"Draining fills one Redis at 1,000,000 ÷ ({request_us:g} + {script_us:g} × scripts per "
        f"request) requests/s: {full_at:,.0f} with 64 requests to a script; {full:,.0f} at the "
        f"{scripts:.3f} scripts per request that {largest['workers']} workers made. By this "
        f"arithmetic it serves {full / per_worker:.0f} workers of {found['slots']} slots at "
        f"200 ms, or {full / per_gpu:.0f} H200s as in the 8B runs below "
        f"({per_gpu:.0f} requests/s each).",
        "",
    ]


def write() -> None:
    """Replace the figures of docs/evidence by the latest results."""
    shown_parts = dict.fromkeys([*(row[0] for row in ROWS), *comparison.PARTS])
    loaded = {part: report.load(part) for part in shown_parts}
    parts = {part: found for part, found in loaded.items() if found is not None}
    lines = [*main_table(parts), ""]
    if "throughput" in parts:
        lines += [*look_ahead_table(parts["throughput"]), ""]
    if "scale" in parts and (h200 := report.load("gpu-8b")):
        lines += full_note(parts["scale"], h200)
    comparison.PAGE.write_text(comparison.put_in(comparison.PAGE.read_text()))
    page = qa_table.put_in(PAGE.read_text())
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    for name, shown in plots.write():
        image = f"![{shown}](plots/{name})"
        if image not in tail:  # those have a section of their own
            lines += [image, ""]
    lines += provenance(parts)
    PAGE.write_text(f"{head}{BEGIN}\n\n" + "\n".join(lines) + f"\n\n{END}{tail}")
