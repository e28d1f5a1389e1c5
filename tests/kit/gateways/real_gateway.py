"""A Redis, a worker with vLLM and the shipped model, and a gateway before them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
from kit.engines.run_batch_lines import NAME, SERVING
from kit.gateways.gateway_process import GatewayProcess
from kit.stacks.celery_side import client_app
from kit.stacks.real_stack import Question, Stack, asked, listed_questions

from contract.openai.body import CHAT_URL
from contract.redis.batches import BatchStore
from demo.stack import CPU_ENGINE_ARGS, RedisServer, eventually, tiny_model_worker

ENDED = ("completed", "failed", "expired", "cancelled")


@dataclass
class RealGateway:
    """The gateway's address, and the SDK's client of it; `model` is what the worker serves."""

    redis_url: str
    folder: Path
    url: str
    client: openai.OpenAI
    model: str = NAME

    def ended(self, batch_id: str, timeout_s: float = 120) -> Any:
        """Return a batch when it has ended."""

        def look() -> Any:
            batch = self.client.batches.retrieve(batch_id)
            return batch if batch.status in ENDED else None

        return eventually(look, timeout_s, f"{batch_id} ends", every_s=0.2)


def questions_as_batch(count: int, seed: int = 1) -> tuple[list[Question], list[dict[str, Any]]]:
    """Return questions that the model knows, and a batch's line for each."""
    questions = listed_questions(count, seed)
    return questions, [
        {"custom_id": f"q{n}", "method": "POST", "url": CHAT_URL,
         "body": {"model": NAME} | asked(question, chat=True)}
        for n, question in enumerate(questions)
    ]  # fmt: skip


@contextmanager
def real_gateway(folder: Path) -> Iterator[RealGateway]:
    """Run all three; the engine has the arguments that run_batch_lines needs."""
    with (
        RedisServer(folder / "redis") as server,
        server.client() as redis_client,
        tiny_model_worker(
            server.url, folder / "worker.log", served_model_name=NAME,
            engine_args=f"{CPU_ENGINE_ARGS} {SERVING}",
        ) as worker,
    ):  # fmt: skip
        app = client_app(server.url)
        store = BatchStore(redis_client, ttl_ms=600_000)
        Stack(server.url, folder, redis_client, store, app).ready(worker, f"warmq.{NAME}")
        app.close()
        with (
            GatewayProcess(server.url, folder, gateway_private_webhooks=True) as gateway,
            openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
        ):
            yield RealGateway(server.url, folder, f"{gateway.url}/v1", client)
