"""The short form of the kills of gateways, carriers and Redis: no line lost, none doubled.

`make faults-gateway-full` is the long one.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import pytest
from carrying import ended, request, results, upload
from celery_side import simulated
from gateway_campaign import GatewayCampaign
from gateway_phases import PHASES, carriers
from gateway_process import GatewayProcess
from gateway_verdict import judge
from settled import assert_nothing_left

from contract.redis.batches import BatchStore
from demo.stack import RedisServer, eventually

pytestmark = pytest.mark.timeout(150)

LINES = 4000
#: WARMQ_TEST_SEED=N draws the kills of a campaign that failed again.
SEED = int(os.environ.get("WARMQ_TEST_SEED") or secrets.randbelow(2**31))


def client_of(gateway: GatewayProcess) -> openai.OpenAI:
    url = f"{gateway.url}/v1"
    return openai.OpenAI(base_url=url, api_key="none", max_retries=8, timeout=20)


def begin(client: openai.OpenAI, n: int, lines: int = LINES) -> Any:
    asked = [request(f"b{n}-{i}", model="" if i == 1 else "small") for i in range(lines)]
    return client.batches.create(
        input_file_id=upload(client, asked), endpoint="/v1/chat/completions",
        completion_window="1h",
    )  # fmt: skip


def assert_every_line_once(
    client: openai.OpenAI, batch_id: str, n: int, lines: int = LINES
) -> None:
    batch = ended(client, batch_id, 90)
    assert batch.status == "completed", batch
    assert results(client, batch) == Counter({f"b{n}-{i}": 1 for i in range(lines)})
    assert batch.request_counts.completed + batch.request_counts.failed == lines


@pytest.mark.parametrize("seed", [pytest.param(SEED, id=f"seed_{SEED}")])
def test_a_kill_in_each_phase_loses_and_doubles_nothing(seed: int, tmp_path: Path) -> None:
    report = GatewayCampaign(tmp_path, seed, len(PHASES), redis_kills=1, most_lines=1500).run(judge)
    # How fast another one takes over is judged where nothing else uses the machine.
    assert report.broken().keys() <= {"slow_takeovers", "robbed"}
    assert {phase for phase in PHASES if report.phases[phase]} == set(PHASES)
    assert report.kills["redis"] == 1


def test_another_gateway_takes_over_within_ten_seconds(server: RedisServer, tmp_path: Path) -> None:
    store = BatchStore(server.client(), ttl_ms=600_000)
    with (
        simulated(server.url, tmp_path / "worker.log", served_model_name="small"),
        GatewayProcess(server.url, tmp_path) as first,
    ):
        eventually(store.announcements, 30, "a worker announces itself")
        with GatewayProcess(server.url, tmp_path, gateway_carries=False) as second:
            client = client_of(second)
            batch = begin(client, 0, 30_000)
            eventually(lambda: store.batch(batch.id), 20, "lines are queued")
            (carrier,) = carriers(first)
            os.kill(carrier, signal.SIGSTOP)  # it holds the batch, and comes back later
            with GatewayProcess(server.url, tmp_path):
                cursor = store.batch(batch.id).number("cursor")  # type: ignore[union-attr]
                began = time.monotonic()
                eventually(
                    lambda: store.batch(batch.id).number("cursor") > cursor,  # type: ignore[union-attr]
                    20,
                    "another goes on",
                )
                assert time.monotonic() - began <= 10
                os.kill(carrier, signal.SIGCONT)
                assert_every_line_once(client, batch.id, 0, 30_000)
            client.close()
    assert_nothing_left(store, 30)
