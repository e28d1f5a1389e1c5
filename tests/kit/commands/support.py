"""Input files, the real command line, and answers that tests commit as a worker would."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import orjson
from kit.commands.json_output import check_printed
from kit.protocol.lessee import Lease, Lessee, client_of, life_of

from contract import naming
from contract.batch import Batch
from contract.errors import RequestRejected, WarmqError
from contract.message import read_delivery
from contract.redis.batches import BatchStore
from contract.results import failure_meta, success_meta
from demo.stack import ROOT, environment_of

TTL_MS = 60_000


def chat_line(custom_id: str | None = None, content: str = "Hello", **body: Any) -> dict[str, Any]:
    """Return an OpenAI batch line."""
    line = {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": content}], **body},
    }
    return {name: value for name, value in line.items() if value is not None}


def write_lines(path: Path, lines: Iterable[dict[str, Any] | bytes]) -> Path:
    """Write an input file; `bytes` lines go in as they are."""
    with path.open("wb") as file:
        for line in lines:
            file.write((line if isinstance(line, bytes) else orjson.dumps(line)) + b"\n")
    return path


def batch_file(path: Path, count: int, prefix: str = "r") -> Path:
    """Write `count` valid lines with custom_ids `<prefix>0`, `<prefix>1`, ..."""
    return write_lines(path, (chat_line(f"{prefix}{i}", f"question {i}") for i in range(count)))


def producer_command(*args: str | Path) -> list[str]:
    """Return the argv of the real command line."""
    return [sys.executable, "-m", "producer", *map(str, args)]


def producer_env(redis_url: str, **env: str) -> dict[str, str]:
    """Return the environment of a command; no WARMQ_ setting of the caller's gets in."""
    return environment_of({"redis_url": redis_url}) | {"PYTHONPATH": str(ROOT)} | env


def run_producer(
    *args: str | Path, redis_url: str, stdin: str | IO[str] | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run the real command line to its end; the JSON it prints is held to the documented schema."""
    given: Any = {"input": stdin} if isinstance(stdin, str) else {"stdin": stdin}
    done = subprocess.run(
        producer_command(*args), env=producer_env(redis_url, **env),
        capture_output=True, text=True, timeout=50, check=False, **given,
    )  # fmt: skip
    check_printed([str(arg) for arg in args], done.stdout)
    return done


def queued(store: BatchStore, queue: str = naming.DEFAULT_QUEUE) -> list[dict[str, Any]]:
    """Return all waiting messages of a queue, decoded, next one first."""
    return [
        orjson.loads(raw)
        for key in store.queue_lengths(queue)
        for raw in reversed(client_of(store).lrange(key, 0, -1))
    ]


def finish(
    lessee: Lessee, leases: Iterable[Lease], error: WarmqError | None = None, text: str = ""
) -> int:
    """DONE for leased messages: an answer that names the custom_id, or `error` for each.

    `text` is what each answer says besides.
    """
    args: list[Any] = []
    for lease in leases:
        it = read_delivery(lease.id, lease.message)
        if error is None:
            body = orjson.dumps(answer(f"answer to {it.custom_id}{text}"))
            meta = success_meta(it, body, {"queued_ms": 1, "engine_ms": 2})
        else:
            meta = failure_meta(
                it.request_id, error, batch=it.batch, custom_id=it.custom_id, line=it.line
            )
        args += [
            lease.id, it.request_id, it.batch, life_of(it), "failed" if error else "completed",
            int(error is not None and not isinstance(error, RequestRejected)), 3, 2, meta,
        ]  # fmt: skip
    return int(lessee.run("done", lessee.worker, TTL_MS, *args))


def answer(text: str) -> dict[str, Any]:
    """Return a chat completion as the engine's adapter gives it: 3 + 2 tokens."""
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": text},
            }
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }


def run_all(store: BatchStore, queue: str = naming.DEFAULT_QUEUE, text: str = "") -> int:
    """Answer everything that waits in a queue; return how many results were written."""
    lessee, count = Lessee(client_of(store), queue=queue), 0
    while leases := lessee.pop(500):
        count += finish(lessee, leases, text=text)
    return count


def state(store: BatchStore, batch_id: str) -> Batch:
    """Return a batch that must exist."""
    batch = store.batch(batch_id)
    assert batch is not None
    return batch


def as_json(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode in (0, 1), done.stderr
    return orjson.loads(done.stdout)
