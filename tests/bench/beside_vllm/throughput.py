"""Tokens per second through the queue against the bare engine: one process, one real vLLM engine.

The same 500 requests run bare, through the serving classes and through the queue
(forms.py), in turn within each repeat. Celery's process is not in it; its thread
sleeps while the drain works.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from bench.beside_vllm.forms import FORMS, TOKENS, warm_engine
from bench.common import report

from demo.stack import CPU_ENGINE_ARGS

REQUESTS = 500
LOOK_AHEADS = (0, 8, 16, 32, 64)
TITLE = f"tokens/s, requests x {TOKENS} tokens; ratios are of paired runs"
EXPECTED = {
    "written": "before the first run, from facts/celery-redis.md section 8",
    "queue_to_bare": 0.92,
    "classes_to_bare": 0.94,
    "best_look_ahead": "8 or 16, the others within 5 % of them except 0",
    "why": "the prototype's drain was equal within noise; vLLM's serving classes were not in it",
}
BARS = {"queue_to_bare": 0.95}


async def measure(quick: bool, model: Path) -> dict[str, Any]:
    """Run all repeats; return the part's figures."""
    count, pairs, sweeps = (150, 2, 1) if quick else (REQUESTS, 7, 5)
    runs: list[list[dict[str, Any]]] = []
    swept: list[dict[str, Any]] = []
    async with warm_engine(model) as forms:
        for form in FORMS:
            await forms.time(form, count)  # warms caches and the first compilations
        for repeat in range(pairs):
            order = report.in_turn(FORMS, repeat)
            runs.append([await forms.time(form, count) for form in order])
        for repeat in range(sweeps):
            for look_ahead in report.in_turn(LOOK_AHEADS, repeat):
                found = await forms.time("queue", count, look_ahead)
                swept.append(found | {"look_ahead": look_ahead, "round": repeat})
    return {
        "model": model.name,
        "requests": count,
        "tokens_each": TOKENS,
        "engine_args": CPU_ENGINE_ARGS,
        "reached": _reached(runs) | _swept(swept),
    }


def _reached(runs: list[list[dict[str, Any]]]) -> dict[str, Any]:
    by_form = [{run["form"]: run for run in turn} for turn in runs]

    def rate(form: str) -> list[float]:
        return [turn[form]["tokens_per_s"] for turn in by_form]

    found: dict[str, Any] = {}
    for form in ("queue", "classes"):
        ratios = [got / bare for got, bare in zip(rate(form), rate("bare"), strict=True)]
        found[f"{form}_to_bare"] = report.spread(ratios)
    for form in FORMS:
        found[f"{form}_tokens_per_s"] = report.spread(rate(form), 0)
        cpu = [turn[form]["cpu_us_per_request"] for turn in by_form]
        found[f"{form}_cpu_us_per_request"] = report.spread(cpu, 0)
    return found


def _swept(swept: list[dict[str, Any]]) -> dict[str, Any]:
    """Return tokens/s by look-ahead, each over the median of its round."""
    rounds: dict[int, list[float]] = {}
    for run in swept:
        rounds.setdefault(run["round"], []).append(run["tokens_per_s"])
    found = {}
    for look_ahead in LOOK_AHEADS:
        mine = [run for run in swept if run["look_ahead"] == look_ahead]
        ratios = [run["tokens_per_s"] / statistics.median(rounds[run["round"]]) for run in mine]
        found[f"look_ahead_{look_ahead}_to_round"] = report.spread(ratios)
    return found
