"""Gateways, their carriers and Redis killed at random moments: no line lost, none doubled."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import pytest
from kit.campaigns.mutations import Mutation, changed_root
from kit.gateways.gateway_process import GatewayProcess
from kit.gateways.http_batches import ended, request, results, upload
from kit.stacks.celery_side import simulated
from kit.verdicts.settled import assert_nothing_left

from contract.redis.batches import BatchStore
from demo.stack import RedisServer, eventually

pytestmark = pytest.mark.timeout(150)

LINES = 4000

#: So that a carrier that is killed is soon followed by another, which is killed as well.
SHORT_LEASE: Mutation = ("gateway/settings.py", "LEASE_S = 6.0", "LEASE_S = 1.0")


def client_of(gateway: GatewayProcess) -> openai.OpenAI:
    url = f"{gateway.url}/v1"
    return openai.OpenAI(base_url=url, api_key="none", max_retries=8, timeout=20)


def carriers(gateway: GatewayProcess) -> list[int]:
    """Return the process ids of a gateway's carriers."""
    assert gateway.process is not None
    folder = Path(f"/proc/{gateway.process.pid}/task")
    try:
        found = [(task / "children").read_text().split() for task in folder.iterdir()]
    except OSError:
        return []
    return [int(pid) for pids in found for pid in pids]


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


@pytest.mark.parametrize("seed", [1, 2])
def test_carriers_killed_at_random_moments_lose_and_double_nothing(
    seed: int, server: RedisServer, tmp_path: Path
) -> None:
    chance = random.Random(seed)
    store = BatchStore(server.client(), ttl_ms=600_000)
    with (
        simulated(server.url, tmp_path / "worker.log", served_model_name="small"),
        GatewayProcess(server.url, tmp_path, root=changed_root(tmp_path, SHORT_LEASE)) as gateway,
    ):
        eventually(store.announcements, 30, "a worker announces itself")
        client, killed = client_of(gateway), 0
        batches = [begin(client, n) for n in range(3)]
        until = time.monotonic() + 12
        while killed < 15 and time.monotonic() < until:
            time.sleep(chance.uniform(0.02, 0.9))  # the fault's moment, at random
            for pid in carriers(gateway):
                os.kill(pid, signal.SIGKILL)
                killed += 1
        for n, batch in enumerate(batches):
            assert_every_line_once(client, batch.id, n)
        assert killed
        client.close()
    assert_nothing_left(store, 30)


def test_another_gateway_takes_over_within_ten_seconds(server: RedisServer, tmp_path: Path) -> None:
    store = BatchStore(server.client(), ttl_ms=600_000)
    with (
        simulated(server.url, tmp_path / "worker.log", served_model_name="small"),
        GatewayProcess(server.url, tmp_path) as first,
    ):
        eventually(store.announcements, 30, "a worker announces itself")
        with GatewayProcess(server.url, tmp_path, gateway_batch_runner=False) as second:
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


@pytest.mark.parametrize("seed", [3])
def test_gateways_killed_at_random_moments_lose_and_double_nothing(
    seed: int, server: RedisServer, tmp_path: Path
) -> None:
    chance = random.Random(seed)
    store = BatchStore(server.client(), ttl_ms=600_000)
    root = changed_root(tmp_path, SHORT_LEASE)
    gateways = [GatewayProcess(server.url, tmp_path, root=root) for _ in range(2)]
    with simulated(server.url, tmp_path / "worker.log", served_model_name="small"):
        eventually(store.announcements, 30, "a worker announces itself")
        try:
            for gateway in gateways:
                gateway.start()
            client = client_of(gateways[0])
            batches = [begin(client, n) for n in range(3)]
            for _ in range(4):
                time.sleep(chance.uniform(0.02, 1.5))  # the fault's moment, at random
                killed = chance.choice(gateways)
                killed.kill()
                killed.start()
            for n, batch in enumerate(batches):
                assert_every_line_once(client, batch.id, n)
            client.close()
        finally:
            for gateway in gateways:
                gateway.kill()
    assert_nothing_left(store, 30)


def test_redis_killed_while_batches_are_carried_loses_and_doubles_nothing(tmp_path: Path) -> None:
    chance = random.Random(4)
    options = ("--appendonly", "yes", "--appendfsync", "always")
    with RedisServer(tmp_path / "redis", *options) as server:
        store = BatchStore(server.client(), ttl_ms=600_000)
        with (
            simulated(server.url, tmp_path / "worker.log", served_model_name="small"),
            GatewayProcess(server.url, tmp_path) as gateway,
        ):
            eventually(store.announcements, 30, "a worker announces itself")
            client = client_of(gateway)
            batches = [begin(client, n) for n in range(2)]
            for _ in range(3):
                time.sleep(chance.uniform(0.05, 1.0))  # the fault's moment, at random
                server.stop(signal.SIGKILL)
                server.start()
            for n, batch in enumerate(batches):
                assert_every_line_once(client, batch.id, n)
            client.close()
        assert_nothing_left(BatchStore(server.client(), ttl_ms=600_000), 30)
