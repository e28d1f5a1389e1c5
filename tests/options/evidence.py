"""Starts the worker for one row, runs a file through it, and says what was seen."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

from kit.engines.drafts import settled
from kit.stacks.real_stack import (
    ROOT,
    Stack,
    asked,
    completion_prompt,
    listed_questions,
    read_jsonl,
    text_of,
    write_jsonl,
)
from options.checkpoints import copy_model, make_adapter, merge, quantised
from options.rows import Row, named

from demo.stack import MODEL, Worker, eventually
from worker.machine.packages import installed

SHORT, LONG = 32, 8
START_S = 300


def lines(named: str | None) -> list[dict[str, Any]]:
    """Return short questions in both forms, then long answers to prompts with one beginning."""
    fields = {"model": named} if named else {}
    short = [asked(q, n % 2 == 0, **fields) for n, q in enumerate(listed_questions(SHORT))]
    start = "\n".join(f"{completion_prompt(q)} {q.answer}" for q in listed_questions(12, 3))
    free = [
        {"prompt": f"{start}\nQuestion: What is {n} plus 1?\nAnswer:", "temperature": 0,
         "max_tokens": 48, "ignore_eos": True, **fields}
        for n in range(LONG)
    ]  # fmt: skip
    return [line | {"custom_id": f"q{n}"} for n, line in enumerate(short + free)]


class Evidence:
    """Runs rows one after another; keeps the answers, which later rows are compared with."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.release = installed().release_of_vllm
        self.answers: dict[str, list[str]] = {}
        models = stack.folder / "models"
        self.folders = {"model": MODEL, "lora": make_adapter(models / "lora")}
        self.folders["zero"] = make_adapter(models / "zero", strength=0)
        self.folders["merged"] = merge(self.folders["lora"], models / "merged")
        self.folders["other-vocabulary"] = copy_model(models / "other", {}, vocab_size=999)
        for method in ("gptq", "awq", "compressed-tensors"):
            self.folders[method] = quantised(models / method, method)

    def run(self, row: Row) -> dict[str, Any]:
        """Return what was seen of one row; `outcome` is works, refused, not run or FAILED."""
        seen: dict[str, Any] = {"option": row.name, "args": row.args}
        if row.needs and importlib.util.find_spec(row.needs) is None:
            return seen | {"outcome": "not run", "why": f"{row.needs} is not installed"}
        if self.release[:2] != row.release:
            return seen | {"outcome": "not run", "why": f"it is of vLLM {named(row.release)}"}
        log = self.stack.folder / f"{row.name}.log"
        worker = Worker(
            self.stack.url, log, env=row.env, model=self._filled(row.model),
            engine_args=f"{row.base} {self._filled(row.args)}",
        )  # fmt: skip
        with worker:
            try:
                if self._ready(worker):
                    return seen | self._judged(row, log)
                return seen | self._ended(row, log)
            finally:
                if worker.process and worker.process.poll() is not None:
                    worker.kill()  # what it may have left behind

    def _ready(self, worker: Worker) -> bool:
        def look() -> str | None:
            if worker.process is None or worker.process.poll() is not None:
                return "ended"
            return "ready" if self.stack.stats().get("state") == "ready" else None

        return eventually(look, START_S, str(worker.log_path), every_s=0.3) == "ready"

    def _ended(self, row: Row, log: Path) -> dict[str, Any]:
        text = self._clean(log)
        found = re.search(row.refused, text) if row.refused else None
        if found:
            return {"outcome": "refused", "seen": [found[0]]}
        return {"outcome": "FAILED", "problems": text.splitlines()[-30:]}

    def _judged(self, row: Row, log: Path) -> dict[str, Any]:
        if row.refused:
            return {"outcome": "FAILED", "problems": ["it started"]}
        bodies = self._submit(row, log)
        if row.cached:
            bodies = self._submit(row, log)
        self.answers[row.name] = [text_of(body) for body in bodies]
        seen, problems = self._told(row, bodies)
        for pattern in row.shows:
            found = self._last(log, pattern)
            seen += [found] if found else []
            problems += [] if found else [f"the log has no {pattern}"]
        if row.speculates:
            drafts = settled(log, float(row.env["VLLM_LOG_STATS_INTERVAL"]))
            accepted = drafts["accepted_tokens"]
            seen.append(f"{accepted} of {drafts['drafted_tokens']} drafted tokens accepted")
            problems += [] if accepted else ["no drafted token was accepted"]
        equal, of = self._equal(row)
        if of:
            seen.append(f"{equal} of {of} answers as {row.like}")
        if equal < row.least * of:
            problems.append("answers differ")
        verdict = {"outcome": "FAILED" if problems else "works", "seen": seen}
        return verdict | ({"problems": problems} if problems else {})

    def _told(self, row: Row, bodies: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
        """Return what `inspect stats` and the responses say, and what they should not."""
        stats = self.stack.stats()
        told = {"max_num_seqs": stats["max_num_seqs"]} | stats["details"]
        seen = [f"{name} {told.get(name)}" for name in row.details]
        problems = [
            f"{name} is not {value}" for name, value in row.details.items()
            if told.get(name) != value
        ]  # fmt: skip
        if row.cached:
            cached = sum(b["usage"]["prompt_tokens_details"]["cached_tokens"] for b in bodies)
            prompts = sum(body["usage"]["prompt_tokens"] for body in bodies)
            seen.append(f"cached_tokens {cached} of {prompts} prompt tokens")
            problems += [] if cached else ["no token came from the prefix cache"]
        return seen, problems

    def _equal(self, row: Row) -> tuple[int, int]:
        mine, theirs = self.answers[row.name], self.answers.get(row.like or "")
        if theirs is None:
            return 0, 0
        return sum(one == other for one, other in zip(mine, theirs, strict=True)), len(mine)

    def _last(self, log: Path, pattern: str) -> str | None:
        try:
            return str(eventually(lambda: re.findall(pattern, self._clean(log)), 10)[-1])
        except TimeoutError:
            return None

    def _submit(self, row: Row, log: Path) -> list[dict[str, Any]]:
        source = write_jsonl(log.with_suffix(".jsonl"), lines(row.named))
        out = log.with_suffix(".out.jsonl")
        done = self.stack.producer("submit", source, "--wait", "--force", "-o", out)
        if done.returncode:
            raise RuntimeError(f"{row.name}: {done.stderr}")
        return [result["response"]["body"] for result in read_jsonl(out)]

    def _filled(self, text: str) -> str:
        for name, folder in self.folders.items():
            text = text.replace("{" + name + "}", str(folder))
        return text

    def _clean(self, log: Path) -> str:
        """Return the log without this machine's paths."""
        text = log.read_text(errors="replace")
        for folder in (self.stack.folder, ROOT, Path(sys.prefix)):
            text = text.replace(f"{folder}/", "")
        return text
