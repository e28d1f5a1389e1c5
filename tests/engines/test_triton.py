"""A worker in front of a real Triton server, whose model has the vLLM backend's signature."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from kit.commands.support import producer_command, producer_env
from kit.engines.in_process import InProcess
from kit.protocol.lessee import chat, client_of
from kit.servers.triton_stack import TritonServer, triton_worker
from kit.stacks.real_stack import read_jsonl, text_of, write_jsonl
from kit.stacks.stage import Stage, stage

from contract import naming
from contract.redis import keys
from demo.stack import Worker, eventually

pytestmark = pytest.mark.timeout(240)
WORKER_READY_S = 60


@pytest.fixture(scope="module")
def mortal(tmp_path_factory: pytest.TempPathFactory) -> TritonServer:
    """Return a server that was not started yet; tests start it, and end it."""
    return TritonServer(tmp_path_factory.mktemp("mortal"))


def started(on: Stage, *servers: TritonServer, **settings: object) -> Worker:
    """Start a worker in front of these servers; it may not be ready yet."""
    log = on.folder / f"worker-{len(on.workers)}.log"
    defaults: dict[str, object] = {"lease_s": 2, "stall_timeout_s": 30, "drain_timeout_s": 10}
    worker = triton_worker(on.server.url, log, *servers, **(defaults | settings)).start()
    on.workers.append(worker)
    return worker


def ended(on: Stage, batch_id: str = "b1") -> int:
    """Return how many requests of a batch have ended."""
    return len(on.store.finished_ids(batch_id, 0, 10_000))


def long_bodies(count: int, tokens: int) -> list[dict[str, Any]]:
    """Return requests that write exactly so many tokens."""
    return [
        chat(f"What is {n % 9} plus 4?", temperature=0, max_tokens=tokens, ignore_eos=True)
        for n in range(count)
    ]


def answers_of(on: Stage, source: Path, name: str) -> list[dict[str, Any]]:
    """Run a file through the installed command; return its output lines."""
    out = on.folder / f"{name}.jsonl"
    ran = subprocess.run(
        producer_command("submit", source, "--batch-id", name, "--wait", "-o", out),
        env=producer_env(on.server.url), capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return read_jsonl(out)


def test_300_short_answers_are_those_of_vllm_in_process(
    in_process: InProcess, triton_server: TritonServer, tmp_path: Path
) -> None:
    # Given 300 questions, chat and completion mixed
    chosen = [f"{kind}{n}" for n in range(150) for kind in "qr"]
    lines = [{"custom_id": cid, **in_process.lines[cid]["body"]} for cid in chosen]
    source = write_jsonl(tmp_path / "in.jsonl", lines)
    expected = in_process.bodies
    with stage(tmp_path) as on:
        # When they go through Triton
        worker = started(on, triton_server)
        on.ready(worker, timeout_s=WORKER_READY_S)
        found = answers_of(on, source, "triton")
        # Then every text, ending and number of tokens is that of vLLM in process
        assert [one["custom_id"] for one in found] == chosen
        for ours in found:
            mine, other = ours["response"]["body"], expected[ours["custom_id"]]
            assert text_of(mine) == text_of(other), ours["custom_id"]
            assert mine["choices"][0]["finish_reason"] == other["choices"][0]["finish_reason"]
            for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
                assert mine["usage"][name] == other["usage"][name], ours["custom_id"]
        assert worker.stop() == 0


def test_a_server_killed_and_restarted_twice_mid_batch_loses_and_doubles_nothing(
    mortal: TritonServer, tmp_path: Path
) -> None:
    with stage(tmp_path) as on:
        try:
            # Given a worker that was started before its server
            worker = started(on, mortal)
            on.submit(long_bodies(500, 8))
            mortal.start()
            # When the server is killed and started again, and later told to end
            for stop, done in ((mortal.kill, 100), (mortal.terminate, 300)):
                eventually(lambda done=done: ended(on) >= done, 90, f"{done} ended", 0.01)
                stop()
                assert ended(on) < 500
                eventually(lambda: on.announced(worker).get("state") == "degraded", 30, "noticed")
                mortal.start()
            on.finish(timeout_s=120)
            # Then all 500 are answered, each once, and no request is under suspicion
            on.settled(simulated=False)
            assert client_of(on.store).llen(keys.suspects_list(naming.DEFAULT_QUEUE)) == 0
            assert client_of(on.store).hlen(keys.DEAD) == 0
            assert worker.stop() == 0
        finally:
            mortal.kill()


def test_requests_of_a_server_that_dies_run_on_the_other_one(
    mortal: TritonServer, triton_server: TritonServer, tmp_path: Path
) -> None:
    first, second = mortal, triton_server
    with stage(tmp_path) as on:
        try:
            first.start()
            worker = started(on, first, second)
            begun = first.started(), second.started()
            on.submit(long_bodies(200, 16))
            # When both have work and one is killed
            eventually(lambda: ended(on) >= 40, 60, "40 ended", 0.01)
            assert first.started() > begun[0] and second.started() > begun[1]
            first.kill()
            on.finish(timeout_s=90)
            # Then the batch is whole and the worker never stopped
            on.settled(simulated=False)
            log = worker.log_path.read_text()
            assert f"{first.url} is down" in log and "rebuilding" not in log
            # And a server that is back gets work again
            first.start()
            words = f"{first.url} is ready"
            eventually(lambda: worker.log_path.read_text().count(words) == 2, 30, words)
            before = first.started()
            on.submit(long_bodies(60, 16), "b2")
            on.finish("b2", timeout_s=60)
            on.settled("b2", simulated=False)
            assert first.started() > before
            assert worker.stop() == 0
        finally:
            first.kill()


def test_a_cancelled_batch_is_cancelled_inside_the_server(
    triton_server: TritonServer, tmp_path: Path
) -> None:
    with stage(tmp_path) as on:
        worker = started(on, triton_server)
        before = triton_server.cancelled(), triton_server.started()
        batch = on.submit(long_bodies(16, 900)).batch
        eventually(
            lambda: triton_server.started() == before[1] + 16, WORKER_READY_S, "16 run", 0.05
        )
        on.store.cancel(batch)
        on.finish()
        eventually(lambda: triton_server.cancelled() == before[0] + 16, 20, "16 cancelled", 0.05)
        assert on.store.batch("b1").number("cancelled") == 16  # type: ignore[union-attr]
        assert worker.stop() == 0


def test_a_server_that_hangs_is_left_and_its_requests_end_when_it_goes_on(
    triton_server: TritonServer, tmp_path: Path
) -> None:
    with stage(tmp_path) as on:
        worker = started(on, triton_server, stall_timeout_s=2)
        on.submit(long_bodies(60, 80))
        eventually(lambda: ended(on) >= 10, WORKER_READY_S, "10 ended", 0.01)
        with triton_server.hanging():
            eventually(
                lambda: "made no step for 2 s" in worker.log_path.read_text(), 30, "it is seen"
            )
        on.finish(timeout_s=90)
        on.settled(simulated=False)
        assert worker.stop() == 0


def test_an_engine_that_dies_inside_a_server_costs_no_request(
    triton_server: TritonServer, tmp_path: Path
) -> None:
    with stage(tmp_path) as on:
        worker = started(on, triton_server)
        on.submit(long_bodies(60, 80))
        eventually(lambda: ended(on) >= 10, WORKER_READY_S, "10 ended", 0.01)
        triton_server.kill_engine()
        # The server lives on, and says that the model is not ready
        eventually(triton_server.unloaded, 30, "the model was taken out", 0.05)
        assert ended(on) < 60
        triton_server.load()
        on.finish(timeout_s=90)
        on.settled(simulated=False)
        assert "engine died: no server is left" in worker.log_path.read_text()
        assert worker.stop() == 0


def test_a_worker_that_waits_for_its_server_takes_nothing_and_stops_when_told(
    tmp_path: Path,
) -> None:
    nobody = TritonServer(tmp_path / "triton")  # never started
    with stage(tmp_path) as on:
        worker = started(on, nobody)
        on.submit(long_bodies(4, 8))
        eventually(
            lambda: on.announced(worker).get("state") == "starting"
            and "waiting for" in worker.log_path.read_text(),
            WORKER_READY_S, "it waits", 0.05,
        )  # fmt: skip
        assert worker.stop() == 0
        assert sum(on.store.queue_lengths(naming.DEFAULT_QUEUE).values()) == 4


def test_what_the_backend_cannot_do_fails_one_line_by_name(
    triton_server: TritonServer, tmp_path: Path
) -> None:
    bodies = [
        chat("What is 3 plus 4?", temperature=0, max_tokens=8),
        chat("What is 3 plus 4?", n=2),
        chat("one two " * 2000, max_tokens=8),
        chat("one two " * 2000),
        chat("What is 3 plus 4?", length_penalty=2.0),
        chat("What is 3 plus 4?", frequency_penalty=0.5),  # the tiny backend knows it not
    ]
    with stage(tmp_path) as on:
        worker = started(on, triton_server)
        on.submit(bodies)
        on.finish(timeout_s=WORKER_READY_S)
        metas = [json.loads(raw or b"{}") for raw in on.store.results(on.ids())]
        assert text_of(metas[0]["result"]) == "7"
        errors = [meta["warmq"]["error"] for meta in metas[1:]]
        assert [error["code"] for error in errors] == [
            "invalid_request", "context_length_exceeded", "context_length_exceeded",
            "invalid_request", "invalid_request",
        ]  # fmt: skip
        assert "field body.n: " in errors[0]["message"]
        assert "field body.length_penalty: " in errors[3]["message"]
        assert "sampling parameters" in errors[4]["message"]
        assert worker.stop() == 0
