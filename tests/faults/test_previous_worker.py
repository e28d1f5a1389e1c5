"""Workers of the previous release behind this release's gateway: refused in words."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest
from kit.gateways.gateway_process import GatewayProcess
from kit.stacks.celery_side import simulated
from kit.stacks.previous import Previous

from contract import naming
from contract.redis.batches import BatchStore
from demo.stack import RedisServer, eventually


@pytest.mark.timeout(120)
def test_an_online_request_is_refused_while_all_workers_are_older(
    previous: Previous, server: RedisServer, tmp_path: Path
) -> None:
    store = BatchStore(server.client(), ttl_ms=60_000)

    def ready(count: int) -> bool:
        found = store.workers(naming.DEFAULT_QUEUE)
        return [worker["state"] for worker in found] == ["ready"] * count

    old = previous.worker(server.url, tmp_path / "old.log", engine="simulated")
    gateway = GatewayProcess(server.url, tmp_path, gateway_carries=False)
    gateway.start()
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=30)
    asked = {"model": "simulated", "messages": [{"role": "user", "content": "Hello"}]}
    try:
        with old, client:
            eventually(lambda: ready(1), 40, "the older worker is ready")
            with pytest.raises(openai.InternalServerError) as refused:
                client.chat.completions.create(**asked)  # type: ignore[call-overload]
            assert (refused.value.status_code, refused.value.code) == (503, "no_worker")
            assert "older than this gateway" in refused.value.message
            assert "upgrade the workers" in refused.value.message
            assert list(client.models.list()) == []
            with simulated(server.url, tmp_path / "new.log"):
                eventually(lambda: ready(2), 40, "this release's worker is ready too")
                eventually(lambda: list(client.models.list()), 10, "its model is shown")
                done = client.chat.completions.create(**asked)  # type: ignore[call-overload]
                assert done.choices[0].message.content.startswith("simulated")
    finally:
        gateway.kill()
