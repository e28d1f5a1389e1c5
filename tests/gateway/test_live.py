"""Online requests through a real gateway and a real worker with the simulated engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from celery_side import simulated
from gateway_process import GatewayProcess

from contract.redis.batches import BatchStore
from demo.stack import RedisServer, Worker, eventually

MODEL = "small"
HELLO = [{"role": "user", "content": "Hello"}]


class Stack:
    """A Redis, a worker and a gateway, with the SDK's client."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self.redis = RedisServer(folder / "redis").start()
        self.log = folder / "engine.log"
        self.worker: Worker = simulated(
            self.redis.url, folder / "worker.log", served_model_name=MODEL, simulated_slots=4,
            look_ahead=0, simulated_log=self.log, lease_s=6,
        ).start()  # fmt: skip
        self.gateway = GatewayProcess(self.redis.url, folder, **settings).start()
        self.client = openai.OpenAI(
            base_url=f"{self.gateway.url}/v1", api_key="none", max_retries=0, timeout=30
        )
        store = BatchStore(self.redis.client(), ttl_ms=60_000)
        eventually(
            lambda: any(w["state"] == "ready" for w in store.announcements()), 30, "a worker"
        )

    def close(self) -> None:
        self.client.close()
        self.gateway.kill()
        self.worker.kill()
        self.redis.stop()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    made = Stack(tmp_path_factory.mktemp("live"))
    yield made
    made.close()


def test_a_chat_is_answered(stack: Stack) -> None:
    answer = stack.client.chat.completions.create(model=MODEL, messages=HELLO)
    assert answer.choices[0].message.content.startswith("simulated ")
    assert answer.usage.total_tokens == 2
    assert answer._request_id.startswith("req_")


def test_a_streamed_chat_has_role_text_and_end(stack: Stack) -> None:
    chunks = list(stack.client.chat.completions.create(model=MODEL, messages=HELLO, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert text.startswith("simulated ")
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert len({c.id for c in chunks}) == 1
