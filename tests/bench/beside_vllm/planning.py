"""`producer plan` beside the truth: three files of different shape on a warmed worker.

One worker process with the real engine and the shipped model. It is warmed with completions of all
lengths; then each file is planned, submitted and waited for, in rounds that begin with another
file. A time is the batch's own: from its creation to its last request's end, so the submit is in.
What the worker has measured goes on from file to file, as it does in use.
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

from bench.common import report
from bench.common.load import wait_ready
from celery import Celery
from kit.commands.planned_files import SHAPES, mixed_prompts, write_shape
from kit.stacks.real_stack import Stack, write_jsonl

from contract.redis.batches import BatchStore
from demo.stack import CPU_ENGINE_ARGS, RedisServer, eventually, tiny_model_worker

WARM_LINES = 800
TIME, TOKENS_IN = "seconds_planned_to_taken", "tokens_in_planned_to_counted"
EXPECTED = {
    "written": "before the first run; from a trace of such files, the rates fitted to it",
    **{f"{TIME}, {shape}": "0.9 to 1.1" for shape in SHAPES},
    **{f"{TOKENS_IN}, {shape}": 1.0 for shape in SHAPES},
    "share_within_range": 0.9,
    "why": "costs of computed, written and read tokens explain each file within 10 %; the time "
    "before the first request and the machine's unrest come on top",
}
BARS = {
    **{f"{TIME}, {shape}": "0.75 to 1.25" for shape in SHAPES},
    **{f"{TOKENS_IN}, {shape}": 1.0 for shape in SHAPES},
}


def measure(quick: bool, folder: Path) -> list[list[dict[str, Any]]]:
    """Run all rounds; return what each file's plan said and what came, round by round."""
    rounds: list[list[dict[str, Any]]] = []
    with RedisServer(folder / "redis") as server, server.client() as client:
        store = BatchStore(client, ttl_ms=3_600_000)
        stack = Stack(server.url, folder, client, store, Celery())
        with tiny_model_worker(server.url, folder / "worker.log"):
            wait_ready(client)
            warm = list(mixed_prompts(WARM_LINES, random.Random(7)))
            _submitted(stack, write_jsonl(folder / "warm.jsonl", warm))
            names = list(SHAPES)
            for number in range(1 if quick else 4):
                turn = number % len(names)
                order = names[turn:] + names[:turn]
                rounds.append([_compared(stack, shape, number) for shape in order])
    return rounds


def _compared(stack: Stack, shape: str, number: int) -> dict[str, Any]:
    path = write_shape(stack.folder / "file.jsonl", shape, seed=100 + number)
    # The worker announces its rates every second; those of the batch before are to be in.
    eventually(lambda: "rates" in stack.store.workers("warmq")[0], 30, "rates are announced")
    planned = json.loads(stack.producer("plan", path, "--json").stdout)
    batch = _submitted(stack, path)
    return {
        "shape": shape,
        "load_before": report.load_now()[0],
        "planned": planned["duration"],
        "seconds": batch["seconds"],
        "planned_tokens_in": planned["prompt_tokens"]["total"],
        "tokens_in": batch["usage"]["prompt_tokens"],
        "planned_tokens_out": planned["completion_tokens"]["expected"],
        "tokens_out": batch["usage"]["completion_tokens"],
        "submit_expected": batch["expected"],
    }


def _submitted(stack: Stack, path: Path) -> dict[str, Any]:
    done = stack.producer("submit", path, "--wait", "--json")
    assert done.returncode == 0, done.stderr
    batch: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return batch


def reached(rounds: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Return planned over true, for each shape."""
    found = {}
    runs = [run for turn in rounds for run in turn]
    for shape in SHAPES:
        mine = [run for run in runs if run["shape"] == shape]
        ratios = [run["planned"]["seconds"] / run["seconds"] for run in mine]
        found[f"{TIME}, {shape}"] = report.spread(ratios)
        exact = [run["planned_tokens_in"] / run["tokens_in"] for run in mine]
        found[f"{TOKENS_IN}, {shape}"] = report.spread(exact, 6)
    inside = [r["planned"]["low"] <= r["seconds"] <= r["planned"]["high"] for r in runs]
    found["share_within_range"] = report.spread([sum(inside) / len(inside)])
    return found


def run(quick: bool) -> None:
    """Measure, save and print."""
    loads = [report.load_now()]
    with tempfile.TemporaryDirectory() as folder:
        rounds = measure(quick, Path(folder))
    loads.append(report.load_now())
    data = {
        "quick": quick, "engine_args": CPU_ENGINE_ARGS, "warm_lines": WARM_LINES,
        "expected": EXPECTED, "bars": BARS, "load_average": loads, "reached": reached(rounds),
        "runs": rounds,
    }  # fmt: skip
    if not quick:
        report.save("planning", data)
    report.figures("producer plan beside the truth, shipped model on the CPU", data)
