"""The same with vLLM itself: what only its processes can show."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from kit.protocol.lessee import chat, client_of
from kit.stacks.stage import Stage, stage
from kit.stacks.started_as import runs

from contract.redis import keys
from demo.stack import MODEL, Worker, eventually

READY_S = 150
#: An engine's first step took 2 s and more on a machine at its slowest.
LONG_STALL_S = 6.0


def engine_part(worker: Worker, title: str) -> psutil.Process:
    """Return the process with that title among the worker's descendants."""

    def look() -> psutil.Process | None:
        for process in psutil.Process(worker.pid).children(recursive=True):
            try:
                if title in (process.cmdline() or [""])[0]:
                    return process
            except psutil.Error:
                continue
        return None

    return eventually(look, 20, title)


def recovered(on: Stage, worker: Worker, deaths: int) -> None:
    """Wait until the engine was rebuilt so many times."""
    eventually(lambda: worker.log_path.read_text().count(" ready in ") == deaths + 1, READY_S)
    on.ready(worker)


def in_flight(on: Stage, worker: Worker) -> None:
    eventually(lambda: on.announced(worker).get("in_flight", 0) >= 32, 30, "in flight")


class Started(NamedTuple):
    """The workers of two tests, each with a stage of its own, ready."""

    usual: tuple[Stage, Worker]
    #: Its context is long, and its model is a copy in its stage's folder.
    long: tuple[Stage, Worker]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """Return two workers that started side by side: the start of an engine keeps one core busy."""
    folder = tmp_path_factory.mktemp("long")
    model = shutil.copytree(MODEL, folder / "model")
    engine_args = (
        "--max-model-len 20480 --max-num-batched-tokens 16 --max-num-seqs 4 --dtype float32 "
        "--hf-overrides '{\"max_position_embeddings\":20480}' --enforce-eager "
        "--kv-cache-memory-bytes 268435456 --gpu-memory-utilization 0.2"
    )
    with stage(tmp_path_factory.mktemp("usual")) as usual, stage(folder) as long:
        found = Started(
            (usual, usual.real_worker()),
            (long, long.real_worker(model=model, engine_args=engine_args,
                                    stall_timeout_s=LONG_STALL_S, rebuild_tries=1)),
        )  # fmt: skip
        for on, worker in found:
            on.ready(worker, timeout_s=READY_S)
        yield found


@pytest.mark.timeout(600)
def test_a_hung_vllm_is_killed_and_rebuilt_and_leaves_no_orphan(started: Started) -> None:
    on, worker = started.usual
    # 40 of them are in flight at once: more would only take longer to compute
    bodies = [chat(f"Count to {n}", max_tokens=300, ignore_eos=True) for n in range(64)]
    on.submit(bodies)
    in_flight(on, worker)
    hung = engine_part(worker, "VLLM::EngineCore")
    hung.suspend()
    eventually(lambda: on.announced(worker)["state"] == "degraded", 30, "degraded")
    recovered(on, worker, 1)
    assert not runs(hung)
    on.finish(timeout_s=120)
    on.settled(simulated=False)
    log = worker.log_path.read_text()
    assert "made no step for 3 s" in log
    assert "EngineCore was killed by SIGKILL" in log

    # The owner is killed while its engine hangs: SIGTERM would not end that one
    on.submit(bodies, "b2")
    in_flight(on, worker)
    children = psutil.Process(worker.pid).children(recursive=True)
    assert len(children) >= 2
    engine_part(worker, "VLLM::EngineCore").suspend()
    on.kill(worker)
    eventually(lambda: all(not runs(p) for p in children), 10, "no orphans", 0.1)


@pytest.mark.timeout(400)
def test_a_long_prefill_is_no_stall_an_orderly_end_no_answer_and_a_lost_model_the_end(
    started: Started,
) -> None:
    on, worker = started.long
    on.submit([chat("warm up", max_tokens=1)], "warm")
    on.finish("warm")
    # A prompt of 20,000 tokens, of which the engine takes 16 a step and says nothing
    on.submit([chat("one two three " * 3_300, max_tokens=1, ignore_eos=True)])
    on.finish(timeout_s=200)
    (raw,) = on.store.results(on.ids())
    assert raw is not None
    meta = json.loads(raw)
    assert meta["result"]["usage"]["prompt_tokens"] > 19_000, meta
    assert meta["warmq"]["timing"]["engine_s"] > LONG_STALL_S
    assert "made no step" not in worker.log_path.read_text()
    on.settled(simulated=False)

    # EngineCore is told to end: it aborts what it has, and that is nobody's answer
    on.submit([chat(f"Count to {n}", max_tokens=200, ignore_eos=True) for n in range(12)], "b2")
    eventually(lambda: on.announced(worker).get("in_flight", 0) >= 4, 30, "in flight")
    engine_part(worker, "VLLM::EngineCore").terminate()
    recovered(on, worker, 1)
    on.finish("b2", timeout_s=120)
    on.settled("b2", simulated=False)
    answers = [json.loads(raw)["result"] for raw in on.store.results(on.ids("b2")) if raw]
    assert {answer["choices"][0]["finish_reason"] for answer in answers} == {"length"}

    # It is killed when its model is damaged: the worker gives it up and says why
    (on.folder / "model" / "model.safetensors").write_bytes(b"damaged")
    children = psutil.Process(worker.pid).children(recursive=True)
    on.submit([chat(f"q{n}", max_tokens=900, ignore_eos=True) for n in range(64)], "b3")
    eventually(lambda: on.announced(worker).get("in_flight", 0) >= 4, 30, "in flight")
    engine_part(worker, "VLLM::EngineCore").kill()
    assert worker.process is not None
    assert worker.process.wait(READY_S) == 1
    # The last words name the cause, which vLLM has only told to EngineCore's own log
    fatal = worker.log_path.read_text().split("the drain ended:")[-1]
    assert "could not be rebuilt in 1 tries" in fatal
    assert "SafetensorError" in fatal or "safetensors" in fatal
    eventually(lambda: all(not runs(p) for p in children), 10, "no orphans", 0.1)
    assert client_of(on.store).zcard(keys.LEASES) == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_deaths_of_vllms_processes_lose_nothing(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        worker = on.real_worker()
        on.ready(worker, timeout_s=READY_S)
        on.submit([chat(f"Count to {n}", max_tokens=300, ignore_eos=True) for n in range(400)])
        for deaths, part in enumerate(("VLLM::EngineCore", "VLLM::Worker"), 1):
            in_flight(on, worker)
            engine_part(worker, part).kill()
            eventually(lambda: on.announced(worker)["state"] == "degraded", 20, "degraded")
            recovered(on, worker, deaths)
        on.finish(timeout_s=120)
        on.settled(simulated=False)
        log = worker.log_path.read_text()
        assert "EngineCore was killed by SIGKILL" in log
        assert "Worker proc VllmWorker-0 died unexpectedly" in log
        assert worker.stop() == 0
