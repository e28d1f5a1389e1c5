"""A Redis, a gateway and a worker with the simulated engine, for batches over HTTP."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import openai
import orjson
from celery_side import simulated
from gateway_process import GatewayProcess
from support import batch_file, producer_command, producer_env

from contract.redis.batches import BatchStore
from contract.redis.gateway.objects import Objects
from demo.stack import RedisServer, eventually

ENDED = ("completed", "failed", "expired", "cancelled")


class BatchStack:
    """A Redis, a gateway, a worker that may be started, and the SDK's client."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.redis = RedisServer(folder / "redis").start()
        self.store = BatchStore(self.redis.client(), ttl_ms=600_000)
        self.worker = simulated(self.redis.url, folder / "worker.log", lease_s=6)
        self.gateway = GatewayProcess(self.redis.url, folder)
        self.gateway.start()
        self.client = self.client_of("none")

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

    def known_file(
        self, file_id: str = "file-known", purpose: str = "batch", tenant: str = "default"
    ) -> str:
        """Write the record of a file, without content: enough for what only creates batches."""
        document = orjson.dumps({
            "id": file_id, "tenant": tenant, "bytes": 0, "created_at": 1, "purpose": purpose,
            "filename": "in.jsonl",
        })  # fmt: skip
        Objects.beside(self.store).create("file", tenant, file_id, 1, document)
        return file_id

    def create(self, **fields: Any) -> Any:
        """Create a batch of a file that is only known."""
        asked = {
            "input_file_id": self.known_file(), "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        } | fields  # fmt: skip
        return self.client.batches.create(**asked)

    def ended(self, batch_id: str) -> Any:
        """Return a batch when it has ended."""

        def look() -> Any:
            batch = self.client.batches.retrieve(batch_id)
            return batch if batch.status in ENDED else None

        return eventually(look, 60, f"{batch_id} ends", every_s=0.1)
