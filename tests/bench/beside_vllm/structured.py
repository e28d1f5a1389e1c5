"""Answers bound to a JSON schema: through the queue, and the same requests given to the engine.

all     every request given to the engine at once, as `LLM.generate` does; the same engine
queue   from Redis, with `response_format`, through vLLM's serving classes

Schemas of 5 and of 50 fields; one schema for all requests, and 100 different ones in turn. Answers
are cut at TOKENS tokens. Before each run vLLM has compiled none of the run's schemas: each run has
field names of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.beside_vllm.forms import Forms, warm_engine
from bench.common import report

from contract.openai.body import COMPLETION_URL
from contract.redis import keys
from demo.stack import CPU_ENGINE_ARGS

REQUESTS = 400
TOKENS = 64
#: (fields of a schema, different schemas)
KINDS = ((5, 1), (5, 100), (50, 1), (50, 100))
FORMS = ("all", "queue")
TITLE = f"response_format json_schema, {TOKENS} tokens a request; ratios are of pairs"
EXPECTED = {
    "written": "before the first run",
    "fields5_schemas1_queue_to_all": 0.9,
    "fields50_schemas100_queue_to_all": 0.8,
    "why": "the serving classes take 0.3 ms a request; each different schema is checked in a "
    "process of its own before the engine compiles it again",
}
BARS = {f"fields{fields}_schemas{schemas}_queue_to_all": 0.9 for fields, schemas in KINDS}


def schema(fields: int, number: int, run: int) -> dict[str, Any]:
    """Return a schema of so many fields, which no other number or run has."""
    kinds: tuple[dict[str, Any], ...] = (
        {"type": "string", "maxLength": 12},
        {"type": "integer", "minimum": 0, "maximum": 999},
        {"enum": ["good", "bad", "mixed"]},
        {"type": "boolean"},
        {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
    )
    names = [f"f{run}_{number}_{field}" for field in range(fields)]
    properties = {name: kinds[at % len(kinds)] for at, name in enumerate(names)}
    return {
        "type": "object", "properties": properties, "required": names,
        "additionalProperties": False,
    }  # fmt: skip


class Structured:
    """The forms over one warm engine."""

    def __init__(self, forms: Forms, count: int) -> None:
        self._forms, self._count = forms, count
        self._engine: Any = forms.drain.supervisor.engine
        self._run = 0

    async def time(self, form: str, fields: int, schemas: int) -> dict[str, Any]:
        """Run all requests one way; return tokens a second."""
        self._run += 1
        made = [schema(fields, number, self._run) for number in range(schemas)]
        run = self._queue if form == "queue" else self._all
        tokens, seconds = await run(made)
        return {"form": form, "tokens_per_s": tokens / seconds, "tokens": tokens}

    def _prompt(self, number: int) -> str:
        return f"Question number {number}: what is the first letter of the alphabet?"

    async def _queue(self, made: Sequence[dict[str, Any]]) -> tuple[int, float]:
        def body(number: int) -> dict[str, Any]:
            wanted = {"name": "answer", "schema": made[number % len(made)]}
            return {
                "prompt": self._prompt(number), "max_tokens": TOKENS, "temperature": 0,
                "response_format": {"type": "json_schema", "json_schema": wanted},
            }  # fmt: skip

        held = await asyncio.to_thread(self._forms.held, self._count, body, COMPLETION_URL)
        began = await asyncio.to_thread(held.release)
        ended = await asyncio.to_thread(held.wait)
        found = held.client.hgetall(keys.batch_key(held.batch.id))
        assert int(found[b"completed"]) == self._count, found
        held.client.flushdb()
        held.client.close()
        return int(found[b"completion_tokens"]), ended - began

    async def _all(self, made: Sequence[dict[str, Any]]) -> tuple[int, float]:
        began = time.perf_counter()
        tokens = await asyncio.gather(
            *(self._one(number, made[number % len(made)]) for number in range(1, self._count + 1))
        )
        return sum(tokens), time.perf_counter() - began

    async def _one(self, number: int, wanted: dict[str, Any]) -> int:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        params = SamplingParams(
            temperature=0, max_tokens=TOKENS, output_kind=RequestOutputKind.FINAL_ONLY,
            structured_outputs=StructuredOutputsParams(json=wanted),
        )  # fmt: skip
        name = f"structured{self._run}-{number}"
        async for output in self._engine._engine.generate(self._prompt(number), params, name):
            ended = output
        return len(ended.outputs[0].token_ids)


def reached(runs: Sequence[dict[str, dict[str, Any]]], kind: str) -> dict[str, Any]:
    """Return one kind's paired ratio, and the rates by form."""
    ratios = [turn["queue"]["tokens_per_s"] / turn["all"]["tokens_per_s"] for turn in runs]
    found: dict[str, Any] = {f"{kind}_queue_to_all": report.spread(ratios)}
    for form in FORMS:
        rates = [turn[form]["tokens_per_s"] for turn in runs]
        found[f"{kind}_{form}_tokens_per_s"] = report.spread(rates, 0)
    return found


async def measure(quick: bool, model: Path) -> dict[str, Any]:
    """Run all repeats; return the part's figures."""
    count, pairs = (200, 2) if quick else (REQUESTS, 5)
    found: dict[str, Any] = {}
    async with warm_engine(model) as forms:
        structured = Structured(forms, count)
        for form in FORMS:
            await structured.time(form, 5, 1)
        for fields, schemas in KINDS:
            runs = []
            for number in range(pairs):
                order = report.in_turn(FORMS, number)
                runs.append({form: await structured.time(form, fields, schemas) for form in order})
            found |= reached(runs, f"fields{fields}_schemas{schemas}")
    return {
        "model": model.name, "requests": count, "tokens_each": TOKENS,
        "engine_args": CPU_ENGINE_ARGS, "reached": found,
    }  # fmt: skip
