"""Short prompts and short answers: requests a second and CPU a request, and where the CPU goes.

One engine in this process, forms in turn (forms.py has what they are run on):

bare        AsyncLLMEngine.generate() with sampling parameters
full        the adapter through vLLM's serving classes; lean: past them, where that is possible
queue       from Redis through the lean path; queue_full: through the serving classes
chat_*      the same of chats
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.beside_vllm.forms import Forms, warm_engine
from bench.beside_vllm.where import Where, looked_at, per_request
from bench.common import report

from contract.openai.body import CHAT_URL, COMPLETION_URL
from demo.stack import CPU_ENGINE_ARGS
from worker.engine import EngineRequest

REQUESTS = 1500
#: As many slots as the GPU runs have: dozens of requests end with each step.
ENGINE_ARGS = CPU_ENGINE_ARGS.replace("--max-num-seqs 32", "--max-num-seqs 256")
FORMS = ("bare", "full", "lean", "queue_full", "queue", "chat_queue_full", "chat_queue")
TITLE = "prompts of 8 to 32 words, answers of 1 to 4 tokens; ratios are of pairs"
EXPECTED = {
    "written": "before the first run",
    "queue_to_bare": 0.95,
    "queue_full_to_bare": 0.70,
    "queue_to_queue_full": 1.35,
    "lean_to_full_cpu": 0.5,
    "why": "on an H200 0.31 of 0.64 ms were serving classes, pydantic and the tokenizer's hops",
}
BARS = {"queue_to_bare": 0.95}
WORDS = "what is the first letter of a and b one two three plus red blue name word sum".split()


def requests(count: int) -> list[tuple[str, int]]:
    """Return prompts of 8 to 32 words, each with its number of output tokens, 1 to 4."""
    rng = random.Random(4321)
    return [
        (" ".join(rng.choices(WORDS, k=rng.randint(8, 32))), rng.randint(1, 4))
        for _ in range(count)
    ]


class Short:
    """The forms over one warm engine."""

    def __init__(self, forms: Forms, count: int) -> None:
        self._forms, self._count = forms, count
        self._adapter: Any = forms.drain.supervisor.engine
        self._wanted = requests(count)

    async def time(self, form: str, where: Where | None = None) -> dict[str, Any]:
        """Run all requests one way; `where` is told of the loop meanwhile."""
        chat = form.startswith("chat_")
        kind = form.removeprefix("chat_")
        run = partial(self._direct, kind)
        if kind.startswith("queue"):
            make, url = (self._chat, CHAT_URL) if chat else (self._body, COMPLETION_URL)
            held = await asyncio.to_thread(self._forms.held, self._count, make, url)
            tokens = sum(tokens for _, tokens in self._wanted)
            run = partial(self._forms.queued, held, completed=self._count, completion_tokens=tokens)
        full = kind.endswith("full")
        return {"form": form} | await looked_at(
            self._adapter, run, self._count, full=full, where=where
        )

    def _body(self, number: int) -> dict[str, Any]:
        prompt, tokens = self._wanted[number - 1]
        return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}

    def _chat(self, number: int) -> dict[str, Any]:
        body = self._body(number)
        return {"messages": [{"role": "user", "content": body.pop("prompt")}]} | body

    async def _direct(self, kind: str) -> float:
        one = self._bare if kind == "bare" else self._through
        return await self._forms.direct(one, self._count)

    async def _bare(self, number: int, request_id: str) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        prompt, tokens = self._wanted[number - 1]
        params = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        async for output in self._adapter._engine.generate(prompt, params, request_id):
            assert len(output.outputs[0].token_ids) == tokens

    async def _through(self, number: int, request_id: str) -> None:
        answer = await self._adapter.generate(
            EngineRequest(COMPLETION_URL, self._body(number)), request_id
        )
        assert answer.completion_tokens == self._wanted[number - 1][1]

    async def learn(self) -> None:
        """Let each form of body be met twice, so that no run has to learn it."""
        for url, make in ((COMPLETION_URL, self._body), (CHAT_URL, self._chat)):
            for number in range(1, 49):
                await self._adapter.generate(EngineRequest(url, make(number)), f"learn{number}")


def _ratios(runs: Sequence[dict[str, Any]], over: str, base: str, figure: str) -> dict[str, Any]:
    return report.spread([turn[over][figure] / turn[base][figure] for turn in runs])


def reached(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return paired ratios, rates and CPU by form."""
    found: dict[str, Any] = {}
    for over, base in (
        ("queue", "bare"), ("queue_full", "bare"), ("queue", "queue_full"), ("lean", "bare"),
        ("full", "bare"), ("chat_queue", "chat_queue_full"),
    ):  # fmt: skip
        found[f"{over}_to_{base}"] = _ratios(runs, over, base, "requests_per_s")
    found["lean_to_full_cpu"] = _ratios(runs, "lean", "full", "cpu_us_per_request")
    for form in FORMS:
        for figure, digits in (("requests_per_s", 0), ("cpu_us_per_request", 0)):
            found[f"{form}_{figure}"] = report.spread([t[form][figure] for t in runs], digits)
    return found


async def measure(quick: bool, model: Path) -> dict[str, Any]:
    """Run all repeats; return the part's figures."""
    count, pairs, looks = (1000, 2, 1) if quick else (REQUESTS, 5, 1)
    runs: list[dict[str, Any]] = []
    places: dict[str, Any] = {}
    async with warm_engine(model, ENGINE_ARGS) as forms:
        short = Short(forms, count)
        await short.learn()
        for form in FORMS:
            await short.time(form)
        for number in range(pairs):
            order = report.in_turn(FORMS, number)
            runs.append({form: await short.time(form) for form in order})
        for form in FORMS:
            where = Where()
            for _ in range(looks):
                await short.time(form, where)
            places[form] = per_request(where, count * looks)
    return {
        "model": model.name, "requests": count, "engine_args": ENGINE_ARGS,
        "reached": reached(runs),
        "cpu_us_by_layer": places,
    }  # fmt: skip
