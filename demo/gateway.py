"""Runs `make demo-gateway`: the unchanged OpenAI SDK over Redis, a worker and `producer serve`.

The demo runs demo/questions.jsonl as a batch from an input file to an output file. Then it asks one
question online, and streams the answer. The engine is vLLM, as in `make demo`.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import openai

from demo.run import EXPECTED, QUESTIONS, answer_of, show
from demo.stack import free_port, on_gpu, private_or_configured_redis, tiny_model_worker

#: Seconds that the demo waits for the engine's start and the batch's end.
TIMEOUT_S = 300


@contextlib.contextmanager
def gateway(redis_url: str, folder: Path) -> Iterator[str]:
    """Run `producer serve` on a free port; yield its URL."""
    port = free_port()
    command = [str(Path(sys.executable).parent / "producer"), "serve", "--port", str(port)]
    env = os.environ | {"WARMQ_REDIS_URL": redis_url, "WARMQ_GATEWAY_STORE": str(folder / "files")}
    show(f"$ producer serve --port {port}")
    with (folder / "gateway.log").open("wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_for(f"{url}/health", process, folder / "gateway.log")
        yield url
    finally:
        process.terminate()
        process.wait(30)


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the URL answers; end the program if it does not within 30 s."""
    until = time.monotonic() + 30
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=1):
            return
        time.sleep(0.1)
    sys.exit(f"the gateway did not start:\n{log.read_text(errors='replace')[-3000:]}")


def as_batch(path: Path) -> bytes:
    """Return a file's chats as lines in the form that OpenAI's Batch API requires."""
    lines = []
    for number, line in enumerate(map(json.loads, path.read_text().splitlines()), 1):
        custom_id = line.pop("custom_id", f"line-{number}")
        body = line.pop("body", None) or line
        if "messages" in body:
            lines.append({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions",
                          "body": body})  # fmt: skip
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def run_batch(client: openai.OpenAI) -> tuple[int, int]:
    """Run the questions through the Batch API; return the numbers of right and of all answers."""
    file = client.files.create(file=("questions.jsonl", as_batch(QUESTIONS)), purpose="batch")
    show(f"client.files.create(...)    {file.id}, {file.bytes:,} bytes")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="1h"
    )
    show(f"client.batches.create(...)  {batch.id}: {batch.status}")
    until, shown = time.monotonic() + TIMEOUT_S, batch.status
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        if time.monotonic() > until:
            sys.exit(f"the batch is still {batch.status}")
        time.sleep(0.5)
        batch = client.batches.retrieve(batch.id)
        if batch.status != shown:
            show(f"client.batches.retrieve()   {batch.status} {batch.request_counts}")
            shown = batch.status
    if batch.output_file_id is None:
        sys.exit(f"the batch has no output: {batch}")
    lines = client.files.content(batch.output_file_id).text.splitlines()
    answers = {line["custom_id"]: answer_of(line) for line in map(json.loads, lines)}
    expected: dict[str, str] = json.loads(EXPECTED.read_text())
    right = sum(answers[custom_id] == expected.get(custom_id) for custom_id in answers)
    show(f"client.files.content(...)   {len(answers)} answers, {right} right; usage {batch.usage}")
    return right, len(answers)


def run_chat(client: openai.OpenAI) -> str:
    """Ask one question online; print the answer while it is written, and return it."""
    model = client.models.list().data[0].id
    first = json.loads(as_batch(QUESTIONS).splitlines()[0])["body"]
    show(f"\nclient.chat.completions.create(model={model!r}, stream=True)")
    answer = ""
    for chunk in client.chat.completions.create(
        model=model, messages=first["messages"], max_tokens=16, temperature=0, stream=True
    ):
        text = chunk.choices[0].delta.content if chunk.choices else None
        answer += text or ""
        print(text or "", end="", flush=True)
    show("")
    return answer


def main() -> int:
    """Run the demo; return the exit status."""
    with tempfile.TemporaryDirectory(prefix="warmq-demo-") as name:
        folder = Path(name)
        device = "an NVIDIA GPU" if on_gpu() else "the CPU"
        show(f"starting Redis, the worker (vLLM on {device}, half a minute) and the gateway")
        with (
            private_or_configured_redis(folder / "redis") as url,
            tiny_model_worker(url, folder / "worker.log"),
            gateway(url, folder) as served,
            openai.OpenAI(base_url=f"{served}/v1", api_key="none") as client,
        ):
            right, count = run_batch(client)
            answer = run_chat(client)
    return 0 if count and right >= 0.9 * count and answer.strip() else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)  # the context managers have stopped everything
