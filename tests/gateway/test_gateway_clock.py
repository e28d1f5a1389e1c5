"""A gateway whose machine's clock is wrong: what it makes counts by Redis' clock."""

from __future__ import annotations

from pathlib import Path

import openai
import orjson
import pytest
from kit.commands.support import chat_line
from kit.gateways.gateway_process import GatewayProcess
from kit.redis_servers.wrong_clock import WrongClock
from kit.stacks.celery_side import simulated

from contract.redis.batches import BatchStore
from demo.stack import RedisServer, eventually

ENDED = ("completed", "failed", "expired", "cancelled")


@pytest.mark.parametrize("off_s", [-600, 600])
def test_a_gateways_clock_neither_expires_batches_nor_makes_them_last(
    redis_server: RedisServer, store: BatchStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    off_s: int,
) -> None:  # fmt: skip
    worker = simulated(redis_server.url, tmp_path / "worker.log", simulated_latency_s=0.1).start()
    clock = WrongClock(tmp_path / "clock")
    clock.step(off_s)
    monkeypatch.setenv("LD_PRELOAD", str(tmp_path / "clock" / "wrong_clock.so"))
    made = GatewayProcess(redis_server.url, tmp_path, test_clock=tmp_path / "clock" / "clock")
    try:
        with made as gateway:
            client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)
            line = orjson.dumps(chat_line("r0"))
            file = client.files.create(
                file=("in.jsonl", line), purpose="batch",
                expires_after={"anchor": "created_at", "seconds": 3600},
            )  # fmt: skip
            now = store.now_ms() / 1000
            assert abs(file.created_at - now) < 5
            begun = client.uploads.create(
                bytes=len(line), filename="x", mime_type="text/plain", purpose="batch"
            )
            assert abs(begun.created_at - now) < 5
            part = client.uploads.parts.create(begun.id, data=line)
            assert client.uploads.complete(begun.id, part_ids=[part.id]).status == "completed"
            batch = client.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions",
                completion_window="5m",  # type: ignore[arg-type]
            )  # fmt: skip
            assert abs(batch.created_at - now) < 10
            eventually(lambda: client.batches.retrieve(batch.id).status in ENDED, 60)
            ended = client.batches.retrieve(batch.id)
            assert (ended.status, ended.request_counts.completed) == ("completed", 1)
            late = client.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions",
                completion_window="1s",  # type: ignore[arg-type]
                extra_body={"priority": 9},
            )  # fmt: skip
            eventually(lambda: client.batches.retrieve(late.id).status in ENDED, 30)
    finally:
        worker.kill()
