"""Runs `make demo`: vLLM, on a GPU or the CPU, answers a file of prompts.

The demo starts the Procfile's worker with the model in models/tiny, and a private Redis if none
answers at WARMQ_REDIS_URL. It submits demo/questions.jsonl, prints some of the answers, and stops
all processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from demo.stack import ROOT, Worker, on_gpu, private_or_configured_redis, tiny_model_worker

QUESTIONS = ROOT / "demo" / "questions.jsonl"
EXPECTED = ROOT / "demo" / "expected.json"
#: Number of answers that are printed.
SHOWN = 12


def show(text: str) -> None:
    """Print and flush a text, so that the reader of a pipe gets it immediately."""
    print(text, flush=True)


def question_of(line: dict[str, object]) -> str:
    """Return the question in an input line: the last line of its text."""
    body = line.get("body", line)
    assert isinstance(body, dict)
    text = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
    lines = [part for part in str(text).splitlines() if part.strip() and part != "Answer:"]
    return lines[-1].removeprefix("Question: ")


def read_lines(path: Path) -> list[dict[str, object]]:
    """Return the objects of a JSONL file; a missing file has none."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def answer_of(line: dict[str, object]) -> str:
    """Return the text of an output line."""
    body = line["response"]["body"]  # type: ignore[index]
    choice = body["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"]).strip()


def report(out: Path, errors: Path, seconds: float) -> int:
    """Print questions and answers; return the exit status."""
    questions = {
        str(line.get("custom_id") or f"line-{number}"): line
        for number, line in enumerate(map(json.loads, QUESTIONS.read_text().splitlines()), 1)
    }
    expected: dict[str, str] = json.loads(EXPECTED.read_text())
    lines = read_lines(out)
    answers = {str(line["custom_id"]): answer_of(line) for line in lines}
    step = max(1, len(answers) // SHOWN)
    show("")
    for custom_id in [*list(answers)[:4], *list(answers)[4::step]][:SHOWN]:
        show(f"  {question_of(questions[custom_id])[:70]:<72} {answers[custom_id]}")
    for line in read_lines(errors):
        show(f"  {line['custom_id']}: {line['error']['message']}")  # type: ignore[index]
    right = sum(answers.get(custom_id) == text for custom_id, text in expected.items())
    tokens = sum(line["response"]["body"]["usage"]["total_tokens"] for line in lines)  # type: ignore[index]
    show(
        f"\n{len(answers)} of {len(questions)} lines answered, "
        f"{right} of {len(expected)} answers right, {tokens} tokens; "
        f"{seconds:.1f} s including the engine's start"
    )
    return 0 if len(answers) == len(expected) and right >= 0.9 * len(expected) else 1


def wait_for(producer: subprocess.Popen[bytes], worker: Worker) -> None:
    """Wait for the producer to end; exit if the worker ends before it."""
    while producer.poll() is None:
        assert worker.process is not None
        if worker.process.poll() is not None:
            producer.terminate()
            log = worker.log_path.read_text(errors="replace")
            sys.exit(f"the worker ended with {worker.process.returncode}:\n{log[-3000:]}")
        time.sleep(0.1)


def main() -> int:
    """Run the demo; return the exit status."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="warmq-demo-") as name:
        folder = Path(name)
        out, errors = folder / "answers.jsonl", folder / "errors.jsonl"
        device = "an NVIDIA GPU" if on_gpu() else "the CPU"
        show(f"starting Redis and the worker (vLLM on {device} takes about half a minute) ...")
        with (
            private_or_configured_redis(folder / "redis") as url,
            tiny_model_worker(url, folder / "worker.log") as worker,
        ):
            command = [
                str(Path(sys.executable).parent / "producer"), "submit", str(QUESTIONS),
                "--wait", "-o", str(out), "--errors", str(errors),
            ]  # fmt: skip
            show("$ " + " ".join(["producer", "submit", "demo/questions.jsonl", *command[3:]]))
            producer = subprocess.Popen(command, env=os.environ | {"WARMQ_REDIS_URL": url})
            try:
                wait_for(producer, worker)
            finally:
                producer.terminate()
                producer.wait()
            seconds = time.monotonic() - began
        return report(out, errors, seconds)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)  # the context managers have stopped everything
