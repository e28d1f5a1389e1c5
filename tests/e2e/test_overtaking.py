"""A chat through a gateway does not wait for the batch's lines that are in the engine already.

The order counts, not seconds: on a busy machine Redis, the gateway and the test may get no
processor time for seconds, while the engine goes on.
"""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import httpx
import pytest
from kit.gateways.gateway_process import GatewayProcess
from kit.protocol.lessee import chat, now, result_of, submit_batch
from kit.stacks.celery_side import simulated

from contract.redis.batches import BatchStore
from demo.stack import (
    CPU_ENGINE_ARGS,
    GPU_ENGINE_ARGS,
    RedisServer,
    eventually,
    on_gpu,
    tiny_model_worker,
)

pytestmark = pytest.mark.timeout(600)
SLOTS = 2
#: The slots and the look-ahead: so many lines are in the engine before the first chat comes.
IN_FLIGHT = 10


def ask(gateway: GatewayProcess, **fields: Any) -> str:
    """Send a chat; return its request id when it is answered."""
    url = f"{gateway.url}/v1/chat/completions"
    answer = httpx.post(url, json=chat("What is 2 + 3?", temperature=0, **fields), timeout=120)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"]).removeprefix("chatcmpl-")


def test_a_chat_starts_before_lines_that_the_engine_had_first(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"

    def started() -> list[str]:
        lines = log.read_text().splitlines() if log.exists() else []
        return [line.split()[1] for line in lines if line.startswith("start ")]

    with RedisServer(tmp_path / "redis") as server, server.client() as client:
        store = BatchStore(client, ttl_ms=600_000)
        submit_batch(store, bodies=[chat(f"{n}", user="simulate:sleep=1") for n in range(18)])
        with (
            GatewayProcess(server.url, tmp_path) as gateway,
            simulated(
                server.url, tmp_path / "worker.log", simulated_slots=SLOTS, simulated_log=log
            ),
        ):
            eventually(started, 60, "lines start")
            first, second = (ask(gateway, user="simulate:sleep=0.1") for _ in range(2))
            eventually(lambda: now(store).finished, 60, "the batch ends")
        assert now(store).number("completed") == 18
    order = started()
    # In the order of arrival the ten lines in flight and those that came with the chat start first.
    assert order.index(first) < IN_FLIGHT, order
    assert order.index(second) - order.index(first) < IN_FLIGHT, order


def test_a_chat_waits_for_slots_only_and_every_line_is_answered_in_full(tmp_path: Path) -> None:
    whole = GPU_ENGINE_ARGS if on_gpu() else CPU_ENGINE_ARGS
    long: dict[str, Any] = {"max_tokens": 600, "ignore_eos": True}
    with RedisServer(tmp_path / "redis") as server, server.client() as client:
        store = BatchStore(client, ttl_ms=600_000)
        lines = submit_batch(store, bodies=[chat(f"question {n}", **long) for n in range(24)])
        with (
            GatewayProcess(server.url, tmp_path) as gateway,
            tiny_model_worker(
                server.url,
                tmp_path / "worker.log",
                engine_args=whole.replace("--max-num-seqs 32", f"--max-num-seqs {SLOTS}"),
                # Engines of other tests would be bound to the same core.
                env={"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
            ),
        ):
            eventually(lambda: now(store).number("completed") >= 2, 300, "lines end")
            chats = [ask(gateway, model="tiny", max_tokens=4) for _ in range(3)]
            results = [result_of(client, chat_id) for chat_id in chats]
            eventually(lambda: now(store).finished, 200, "the batch ends")
        assert now(store).number("completed") == len(lines.ids)
        assert now(store).number("completion_tokens") == len(lines.ids) * long["max_tokens"]
        ends = [ended_at(result_of(client, line_id)) for line_id in lines.ids]
    for result in results:
        until = ended_at(result)
        since = until - result["warmq"]["timing"]["engine_s"]
        # In each slot, the line that runs when the worker takes the chat, and at most one more.
        assert sum(since < end < until for end in ends) <= 2 * SLOTS, (since, until, ends)


def ended_at(result: dict[str, Any]) -> float:
    """Return the time of the worker's clock at which a request ended."""
    return dt.datetime.fromisoformat(result["date_done"]).timestamp()
