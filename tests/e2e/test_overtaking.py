"""A chat through a gateway does not wait for the batch's lines that are in the engine already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from kit.gateways.gateway_process import GatewayProcess
from kit.protocol.lessee import chat, now, submit_batch

from contract.redis.batches import BatchStore
from demo.stack import (
    CPU_ENGINE_ARGS,
    GPU_ENGINE_ARGS,
    RedisServer,
    eventually,
    on_gpu,
    tiny_model_worker,
)

pytestmark = pytest.mark.timeout(300)
LINES, TOKENS = 30, 900


def test_a_chat_passes_the_look_ahead_and_every_line_is_answered_in_full(tmp_path: Path) -> None:
    whole = GPU_ENGINE_ARGS if on_gpu() else CPU_ENGINE_ARGS
    args = whole.replace("--max-num-seqs 32", "--max-num-seqs 2")
    long: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True}
    bodies = [chat(f"question {n}", **long) for n in range(LINES)]
    with RedisServer(tmp_path / "redis") as server, server.client() as client:
        store = BatchStore(client, ttl_ms=600_000)
        submit_batch(store, bodies=bodies)

        def completed() -> int:
            return now(store).number("completed")

        with (
            tiny_model_worker(server.url, tmp_path / "worker.log", engine_args=args),
            GatewayProcess(server.url, tmp_path) as gateway,
        ):
            eventually(lambda: completed() >= 2, 120, "lines end", every_s=0.02)
            waited = []
            for _ in range(3):
                before = completed()
                body = chat("What is 2 + 3?", model="tiny", max_tokens=4, temperature=0)
                url = f"{gateway.url}/v1/chat/completions"
                assert httpx.post(url, json=body, timeout=60).status_code == 200
                waited.append(completed() - before)
            # Ten lines are in flight. The first chat waits in Redis until four of them have ended,
            # the next ones until one has; in the order of arrival each waited for ten.
            assert waited[0] <= 8, waited
            assert max(waited[1:]) <= 6, waited
            eventually(lambda: now(store).finished, 200, "the batch ends")
        assert completed() == LINES
        assert now(store).number("completion_tokens") == LINES * TOKENS
