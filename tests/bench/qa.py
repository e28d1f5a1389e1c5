"""`make bench-qa`: the tutorial's experiment, a file of reading-comprehension questions.

    qa.py [--questions 1000] [--groups one,warmq,ngram,draft,tp2,pp2] [--out FILE]
    qa.py --shape 8b --groups one+warmq,ngram+draft,tp2,pp2      # on a machine with two GPUs

one     one question after another against vLLM's server, as the tutorial asks them
warmq   the real worker, everything queued
ngram   warmq, with n-gram speculation (5 tokens, prompt lookup of at most 4)
draft   warmq, with a draft model (5 tokens), which is the model itself
tp2     warmq, tensor parallel over two devices
pp2     warmq, two pipeline stages

Without --shape the shipped tiny model answers on the CPU, and answers are compared with the right
ones. Speculation kills vLLM 0.30 there; `make bench-qa` has 0.29, so that all ways are of one
release. With 0.30 those two say why they cannot run. With --shape a Llama shape with dummy weights
writes 64 tokens for each question: what it writes means nothing, so neither does what a speculation
gains on it. Ways joined by + start together, a device each, and still run one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[2]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "models" / "training"))

import aiohttp
from bench.common import report
from bench.common.load import hold, is_ready
from bench.common.process import Process, well
from bench.gpu import pairs, workload
from bench.gpu.record import accelerator
from kit.engines.drafts import settled
from prompt_forms import chat_messages
from questions import held_out_reading

from contract.openai.body import CHAT_URL
from contract.redis import keys
from demo.stack import CPU_ENGINE_ARGS, MODEL, RedisServer, eventually, free_port, procfile_command

GPU_TOKENS, CPU_TOKENS = 64, 24
#: Of the way `one`, so many are asked; its time for the file is that share's, scaled up.
ALONE_GPU = 100
NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}
#: Of the tutorial's table, in minutes; two GPUs, vLLM of 2024.
TUTORIAL_MINUTES = {"warmq": 16, "tp2": 8, "pp2": 18, "draft": 12, "ngram": 5}
START_S, RUN_S = 200, 900
#: How often vLLM tells of drafted and accepted tokens, in every way that is queued.
STATS_S = 1
CPU_ENV = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
#: On the CPU vLLM 0.30 needs the warm-up for pipeline stages, which --enforce-eager leaves out.
STAGED = '--compilation-config \'{"mode": 2, "backend": "eager"}\''
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


class Questions:
    """The file: bodies and right answers, and how often each way answers it."""

    def __init__(self, count: int, shape: str | None, runs: int) -> None:
        self.shape, self.runs = shape, runs
        found = list(held_out_reading(seed=303, count=count))
        self.answers = [question.answer for question in found]
        fields: dict[str, Any] = {"temperature": 0, "max_tokens": CPU_TOKENS}
        if shape:
            fields = {"temperature": 0, "max_tokens": GPU_TOKENS, "ignore_eos": True}
        self.bodies = [{"messages": chat_messages(question), **fields} for question in found]

    def right(self, texts: Sequence[str]) -> int | None:
        """Return how many answers are right; None where the weights are random."""
        if self.shape:
            return None
        return sum(
            text.strip() == answer for text, answer in zip(texts, self.answers, strict=False)
        )


class Way:
    """One way: its engine, and how the file goes through it."""

    def __init__(self, name: str, folder: Path, model: Path, options: str, cards: str) -> None:
        self.name, self.folder = name, folder / name
        self.folder.mkdir()
        extra = {
            "ngram": f"--speculative-config '{json.dumps(NGRAM)}'",
            "draft": f"--speculative-config '{json.dumps(draft_of(model))}'",
            "tp2": "--tensor-parallel-size 2 --distributed-executor-backend mp",
            "pp2": "--pipeline-parallel-size 2 --distributed-executor-backend mp",
        }
        self.options = f"{options} {extra.get(name, '')}".strip()
        # On a CPU, processes would each want a NUMA node of their own.
        self._env = {"CUDA_VISIBLE_DEVICES": cards} if cards else CPU_ENV
        if name == "pp2" and not cards:
            self.options = self.options.replace("--enforce-eager", STAGED)
        self._model = str(model)
        self._stack = ExitStack()

    def start(self) -> None:
        """Start it; `ready` waits."""
        log = self.folder / "log"
        self.port = free_port()
        if self.name == "one":
            command = [
                sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model",
                self._model, "--port", str(self.port), *shlex.split(self.options),
            ]  # fmt: skip
            env = self._env
        else:
            self.redis = self._stack.enter_context(RedisServer(self.folder / "redis"))
            command = procfile_command()
            env = self._env | {
                "WARMQ_REDIS_URL": self.redis.url, "WARMQ_MODEL": self._model,
                "WARMQ_ENGINE_ARGS": self.options, "VLLM_LOG_STATS_INTERVAL": str(STATS_S),
            }  # fmt: skip
        cache = os.environ.get("VLLM_CACHE_ROOT")
        if cache:  # two that start together must not meet in it
            env = env | {"VLLM_CACHE_ROOT": f"{cache}-{self._env.get('CUDA_VISIBLE_DEVICES', '')}"}
        self.process = Process(log, command, HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", **env)
        self._stack.callback(self.process.stop)

    def ready(self) -> None:
        """Wait for the engine."""
        if self.name == "one":
            eventually(self._well, START_S, f"{self.name} is ready", 0.5)
            return
        eventually(self._announced, START_S, f"{self.name} is ready", 0.5)

    def _well(self) -> bool:
        self.process.check()
        return well(f"http://127.0.0.1:{self.port}")

    def _announced(self) -> bool:
        self.process.check()
        with self.redis.client() as client:
            return is_ready(client)

    def answer(self, bodies: Sequence[dict[str, Any]]) -> tuple[float, list[dict[str, Any]]]:
        """Return the seconds and the responses."""
        if self.name == "one":
            return asyncio.run(self._one_by_one(bodies))
        with self.redis.client() as client:
            client.flushdb()
            held = hold(client, "qa", len(bodies), lambda n: bodies[n - 1], url=CHAT_URL)
            began = held.release()
            seconds = held.wait(RUN_S) - began
            metas = client.mget([keys.result_key(rid) for rid in held.request_ids])
        return seconds, [json.loads(meta)["result"] for meta in metas]

    async def _one_by_one(
        self, bodies: Sequence[dict[str, Any]]
    ) -> tuple[float, list[dict[str, Any]]]:
        url, answers = f"http://127.0.0.1:{self.port}{CHAT_URL}", []
        async with aiohttp.ClientSession() as session:
            began = time.perf_counter()
            for body in bodies:
                async with session.post(url, json=body) as answer:
                    answers.append(await answer.json())
            return time.perf_counter() - began, answers

    def drafts(self) -> dict[str, int]:
        """Return the tokens drafted and accepted until now, where it speculates."""
        if "--speculative-config" not in self.options:
            return {}
        return settled(self.process.log, STATS_S)

    def stop(self) -> None:
        """End it and its Redis."""
        self._stack.close()


def without_paths(text: str) -> str:
    """Return it without where this machine has the checkout."""
    return text.replace(f"{report.ROOT}/", "")


def draft_of(model: Path) -> dict[str, Any]:
    """Return the speculative configuration of a model that is its own draft."""
    return {"method": "draft_model", "model": str(model), "num_speculative_tokens": 5}


def run_group(
    names: Sequence[str], questions: Questions, folder: Path, model: Path, options: str
) -> dict[str, dict[str, Any]]:
    """Start the ways of a group together, run each alone, stop them; a way that cannot start
    says why."""
    found: dict[str, dict[str, Any]] = {}
    ways = []
    for number, name in enumerate(names):
        cards = "" if not questions.shape else "0,1" if name in ("tp2", "pp2") else str(number)
        way = Way(name, folder, model, options, cards)
        way.start()
        ways.append(way)
    try:
        for way in ways:
            began = time.monotonic()
            try:
                way.ready()
            except (RuntimeError, TimeoutError) as error:
                found[way.name] = {"cannot_run": without_paths(str(error)[-1500:])}
                continue
            found[way.name] = {"ready_s": round(time.monotonic() - began, 1)}
        for way in (way for way in ways if "cannot_run" not in found[way.name]):
            found[way.name] |= timed(way, questions)
            print(
                json.dumps({way.name: {k: v for k, v in found[way.name].items() if k != "texts"}})
            )
    finally:
        for way in ways:
            way.stop()
    return found


def timed(way: Way, questions: Questions) -> dict[str, Any]:
    """Warm it up and take the time of the whole file, as often as is asked for."""
    bodies = questions.bodies
    if way.name == "one" and questions.shape:
        bodies = bodies[:ALONE_GPU]
    way.answer(bodies[:20])
    before = way.drafts()
    runs = [way.answer(bodies) for _ in range(questions.runs)]
    seconds = report.spread([run_s for run_s, _ in runs])
    answers = runs[-1][1]
    texts = [answer["choices"][0]["message"]["content"] for answer in answers]
    found = {
        "options": without_paths(way.options), "asked": len(bodies), "seconds": seconds,
        "seconds_for_the_file": round(seconds["median"] * len(questions.bodies) / len(bodies), 3),
        "completion_tokens": sum(answer["usage"]["completion_tokens"] for answer in answers),
        "right": questions.right(texts), "texts": texts,
    }  # fmt: skip
    return found | {name: count - before[name] for name, count in way.drafts().items()}


def measure(
    groups: Sequence[Sequence[str]], questions: Questions, kv_gib: float, data: Any
) -> Iterator[None]:
    """Run all groups into `data`; yield after each."""
    shape = questions.shape
    with tempfile.TemporaryDirectory(prefix="warmq-qa-") as name:
        folder, model, options = Path(name), MODEL, f"{CPU_ENGINE_ARGS} --no-enable-prefix-caching"
        if shape:
            model = workload.write_model(folder / f"llama-{shape}", shape)
            (model / "chat_template.jinja").write_text(TEMPLATE)
            given = {"max_num_seqs": 256, "kv_cache_memory_bytes": int(kv_gib * pairs.GIB)}
            options = pairs.as_options(pairs.ENGINE | given)
        texts: dict[str, list[str]] = {}
        for names in groups:
            for way, figures in run_group(names, questions, folder, model, options).items():
                texts[way] = figures.pop("texts", [])
                data["ways"][way] = figures
            data["load_average"].append(report.load_now())
            compare(data["ways"], texts)
            yield


def compare(ways: dict[str, dict[str, Any]], texts: dict[str, list[str]]) -> None:
    """Set each way beside plain warmq: its time, and how many of its texts are the same."""
    if "seconds" not in ways.get("warmq", {}):
        return
    for name, way in ways.items():
        if "seconds" in way:
            whole = ways["warmq"]["seconds_for_the_file"]
            way["to_warmq"] = round(way["seconds_for_the_file"] / whole, 3)
            both = zip(texts[name], texts["warmq"], strict=False)
            way["same_as_warmq"] = sum(a == b for a, b in both)


def main() -> None:
    """Parse the command line, run, save and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=3, help="of the file, by each way")
    parser.add_argument("--shape", choices=sorted(workload.SHAPES))
    parser.add_argument("--groups", default="one,warmq,ngram,draft,tp2,pp2")
    parser.add_argument("--kv-gib", type=float, default=40)
    parser.add_argument("--out", type=Path, default=report.RESULTS / "qa.json")
    parser.add_argument("--commit", help="where the checkout has no git")
    chosen = parser.parse_args()
    groups = [group.split("+") for group in chosen.groups.split(",")]
    machine = report.machine() | ({"commit": chosen.commit} if chosen.commit else {})
    data: dict[str, Any] = {
        "part": "qa", "machine": machine | {"accelerator": accelerator()},
        "shape": chosen.shape or "the shipped tiny model", "questions": chosen.questions,
        "load_average": [report.load_now()], "tutorial_minutes": TUTORIAL_MINUTES, "ways": {},
    }  # fmt: skip
    questions = Questions(chosen.questions, chosen.shape, chosen.runs)
    for _ in measure(groups, questions, chosen.kv_gib, data):
        chosen.out.write_text(report.as_text(data))
    report.table(
        f"{data['questions']} reading-comprehension questions, {data['shape']}",
        ("way", "seconds for the file", "÷ warmq", "drafted", "accepted", "right",
         "same text as warmq", "tutorial, min"),
        [
            (name, *(str(way.get(key, way.get("cannot_run", "")[-60:])) for key in
             ("seconds_for_the_file", "to_warmq", "drafted_tokens", "accepted_tokens", "right",
              "same_as_warmq")),
             str(TUTORIAL_MINUTES.get(name, "")))
            for name, way in data["ways"].items()
        ],
    )  # fmt: skip


if __name__ == "__main__":
    main()
