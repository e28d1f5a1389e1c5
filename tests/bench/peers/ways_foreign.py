"""Ways that other projects offer, in environments of their own over this one's vLLM: llmq, Ray."""

from __future__ import annotations

import datetime as dt
import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

from bench.peers.overlay import CannotRun, environment, told, version
from bench.peers.rabbit import RabbitServer
from bench.peers.ways import ENGINE_ENV, PYTHONPATH, TOKENS, Found, body, end

from demo.stack import MODEL, eventually

PROGRAMS = Path(__file__).resolve().parent / "programs"
SLOTS = 32


class Llmq:
    """llmq: RabbitMQ, its own worker and commands; see llmq_worker.py for what had to be mended.

    It samples at temperature 0.7, to the end of sequence or the token limit. So its model is a copy
    that knows no end of sequence.
    """

    warm = True

    def __init__(self, folder: Path) -> None:
        self.name = f"{version('llmq')} (mended), RabbitMQ"
        self._folder = folder
        self._rabbit = RabbitServer(folder / "rabbit")
        self._worker: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start RabbitMQ and the worker."""
        python = environment("llmq", over_base=True)
        self._command = python.parent / "llmq"
        self._rabbit.start()
        self._env = os.environ | ENGINE_ENV | {
            "RABBITMQ_URL": self._rabbit.url, "VLLM_QUEUE_PREFETCH": str(2 * SLOTS),
            "VLLM_MAX_TOKENS": str(TOKENS), "PYTHONPATH": PYTHONPATH,
        }  # fmt: skip
        log = self._folder / "llmq.log"
        with log.open("ab") as file:
            self._worker = subprocess.Popen(
                [python, PROGRAMS / "llmq_worker.py", self._endless_model(), "bench"],
                env=self._env, stdout=file, stderr=file, start_new_session=True,
            )  # fmt: skip
        try:
            eventually(lambda: self._consumes(log), 150, f"llmq's worker consumes: {log}", 0.3)
        except (AssertionError, TimeoutError) as error:
            raise CannotRun(f"its worker does not start: {error}") from error

    def _consumes(self, log: Path) -> bool:
        assert self._worker is not None
        text = log.read_text()
        assert self._worker.poll() is None, told(text)
        return "starting to consume" in text

    def _endless_model(self) -> Path:
        folder = self._folder / "endless-model"
        shutil.copytree(MODEL, folder)
        (folder / "generation_config.json").unlink()
        for name, field in (("config", "eos_token_id"), ("tokenizer_config", "eos_token")):
            file = folder / f"{name}.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | {field: None}))
        return folder

    def run(self, count: int) -> Found:
        """Submit a file and take the results from their stream, as its manual says.

        The rate is from the first publication to the last result that its worker stamped.
        """
        given = self._folder / "llmq.jsonl"
        given.write_text("".join(
            json.dumps({"id": f"r{n}", "messages": body(n)["messages"]}) + "\n"
            for n in range(count)
        ))  # fmt: skip
        answers = self._folder / "llmq-answers.jsonl"
        began = time.monotonic()
        with answers.open("wb") as out, (self._folder / "llmq-submit.log").open("wb") as log:
            submit = subprocess.Popen(
                [self._command, "submit", "bench", given, "--stream"],
                env=self._env, stdout=out, stderr=log, start_new_session=True,
            )  # fmt: skip
        eventually(lambda: answers.read_bytes().count(b"\n") >= count, 300, "llmq's results", 0.02)
        wall = time.monotonic() - began
        end(submit)
        found = [json.loads(line) for line in answers.read_text().splitlines()]
        first = min(_epoch(it["timestamp"]) - it["duration_ms"] / 1000 for it in found)
        last = max(_epoch(it["timestamp"]) for it in found)
        return {"tokens_per_s": count * TOKENS / (last - first), "wall_s": wall}

    def stop(self) -> None:
        """Stop the worker, then RabbitMQ."""
        end(self._worker)
        self._rabbit.stop()


def _epoch(text: str) -> float:
    return dt.datetime.fromisoformat(text).replace(tzinfo=dt.UTC).timestamp()


class RayData:
    """Ray Data LLM: an engine for each run. The rate is over the batches' times in its log."""

    warm = False

    def __init__(self, folder: Path) -> None:
        self.name = f"Ray Data LLM ({version('ray')})"
        self._folder = folder

    def start(self) -> None:
        """Install it; nothing stays between two runs."""
        self._python = environment("ray", over_base=True)

    def run(self, count: int) -> Found:
        """Run the script for one file."""
        log = self._folder / "ray.log"
        began = time.monotonic()
        process = subprocess.Popen(
            [self._python, PROGRAMS / "ray_batch.py", str(count)],
            env=os.environ | ENGINE_ENV | {"PYTHONPATH": PYTHONPATH}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        spans, generated = [], 0
        assert process.stdout is not None
        with log.open("w") as file:
            for line in process.stdout:
                file.write(line)
                if found := re.search(r"Elapsed time for batch \w+ with size \d+: (\S+)", line):
                    now = time.monotonic()
                    spans.append((now - float(found[1]), now))
                if found := re.match(r"generated (\d+)", line):
                    generated = int(found[1])
        process.wait(60)
        wall = time.monotonic() - began
        if generated != count * TOKENS or not spans:
            raise CannotRun(told(log.read_text()))
        seconds = max(span[1] for span in spans) - min(span[0] for span in spans)
        return {"tokens_per_s": generated / seconds, "wall_s": wall}

    def stop(self) -> None:
        """Nothing is left."""
