"""A Redis, a gateway and a worker with the simulated engine, for batches over HTTP."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import openai
import orjson
from kit.commands.support import batch_file, chat_line, producer_command, producer_env
from kit.gateways.gateway_process import GatewayProcess
from kit.stacks.celery_side import simulated

from contract.redis.batches import BatchStore
from demo.stack import RedisServer, eventually

ENDED = ("completed", "failed", "expired", "cancelled")


class BatchStack:
    """A Redis, a gateway, a worker that may be started, and the SDK's client."""

    def __init__(self, folder: Path, *, runs_batches: bool = False) -> None:
        self.folder = folder
        self.redis = RedisServer(folder / "redis").start()
        self.store = BatchStore(self.redis.client(), ttl_ms=600_000)
        self.worker = simulated(self.redis.url, folder / "worker.log", lease_s=6)
        self.gateway = GatewayProcess(self.redis.url, folder, gateway_batch_runner=runs_batches)
        self.gateway.start()
        self.client = self.client_of("none")
        self._files: dict[tuple[str, str], str] = {}

    def client_of(self, key: str) -> openai.OpenAI:
        """Return the SDK's client for a key."""
        url = f"{self.gateway.url}/v1"
        return openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=30)

    def close(self) -> None:
        """End all processes."""
        self.client.close()
        self.gateway.kill()
        if self.worker.process is not None:
            self.worker.kill()
        self.redis.stop()

    def producer(self, *args: str | Path) -> str:
        """Run the producer command; return what it prints."""
        command = producer_command(*args)
        done = subprocess.run(
            command, env=producer_env(self.redis.url), capture_output=True, timeout=60, check=False
        )
        assert done.returncode in (0, 1), done.stderr.decode()
        return done.stdout.decode()

    def submit(self, batch_id: str, lines: int = 3) -> None:
        """Queue a file by `producer submit`."""
        source = batch_file(self.folder / f"{batch_id}.jsonl", lines)
        self.producer("submit", source, "--batch-id", batch_id)

    def uploaded(self, client: openai.OpenAI | None = None, purpose: Any = "batch") -> str:
        """Return a file of one line that a client has uploaded, the same each time.

        Its batches stay as they are for as long as no worker serves the queue.
        """
        of = client or self.client
        key = (of.api_key, purpose)
        if key not in self._files:
            line = orjson.dumps(chat_line("r0"))
            self._files[key] = of.files.create(file=("in.jsonl", line), purpose=purpose).id
        return self._files[key]

    def create(self, **fields: Any) -> Any:
        """Create a batch of that file."""
        asked = {
            "input_file_id": self.uploaded(), "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        } | fields  # fmt: skip
        return self.client.batches.create(**asked)

    def ended(self, batch_id: str) -> Any:
        """Return a batch when it has ended."""

        def look() -> Any:
            batch = self.client.batches.retrieve(batch_id)
            return batch if batch.status in ENDED else None

        return eventually(look, 60, f"{batch_id} ends", every_s=0.1)
