"""Two front ends over one vLLM: which of its processes dies decides what is lost, and for how long.

An engine takes 20 s to start, so one serves the whole file.
"""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest
from kit.campaigns.campaign_real import completed_by, front_ends, holds_leases
from kit.protocol.lessee import chat
from kit.stacks.stage import stage
from kit.stacks.started_as import command_of, processes_of, runs

from demo.stack import eventually

READY_S = 150
#: What is given to processes that end when others have.
GONE_S = 3
SCHEMA = {"type": "object", "properties": {"odd": {"type": "boolean"}}}
YES = {"type": "json_schema", "json_schema": {"name": "yes", "schema": SCHEMA}}


def compiles(process: psutil.Process) -> bool:
    return any("grammar_process" in command_of(each) for each in process.children())


@pytest.mark.timeout(600)
def test_a_front_end_dies_without_its_engine_and_an_engine_takes_all_front_ends_along(
    tmp_path: Path,
) -> None:
    with stage(tmp_path) as on:
        # The engine makes no step while its only requests wait for their compiler to start.
        worker = on.real_worker(front_ends=2, stall_timeout_s=60)

        def whole() -> bool:
            return on.announced(worker).get("slots") == 32

        eventually(whole, READY_S, "both front ends are ready")
        engine = [p for p in psutil.Process(worker.pid).children(recursive=True)
                  if "VLLM::EngineCore" in (p.cmdline() or [""])[0]]  # fmt: skip
        # Of many lengths: when a front end completes its first, it has others in the engine.
        bodies = [chat(f"Count to {n}", max_tokens=100 + n % 16 * 40, ignore_eos=True)
                  for n in range(120)]  # fmt: skip
        (victim,) = front_ends(worker)
        on.submit([chat(f"{n}?", max_tokens=9, response_format=YES) for n in range(48)], "b0")
        on.finish("b0", timeout_s=150)
        assert compiles(victim)
        eventually(lambda: on.announced(worker)["done"]["completed"] == 48, 30, "they announce it")
        before = completed_by(on, victim)
        on.submit(bodies)
        eventually(lambda: completed_by(on, victim) > before, 60, "one of its own is completed")
        its = victim.children(recursive=True)
        victim.kill()
        eventually(lambda: not any(map(runs, its)), GONE_S, f"what it had started has ended: {its}")
        eventually(lambda: [p for p in front_ends(worker) if p.pid != victim.pid], 30, "another")
        on.finish(timeout_s=150)
        on.settled(simulated=False)
        log = worker.log_path.read_text()
        assert "front end 2 has died" in log
        aborted = re.search(r"\((\d+) requests were aborted in the engine\)", log)
        assert aborted
        assert int(aborted[1]) > 0
        assert all(process.is_running() for process in engine), "the engine lives on"
        assert log.count("engine died") == 0

        eventually(whole, READY_S, "both front ends are ready")
        on.submit(bodies, "b2")
        (other,) = front_ends(worker)
        eventually(lambda: holds_leases(on, other), 30, "both have requests in the engine")
        engine[0].kill()
        eventually(lambda: not other.is_running() or other.status() == "zombie", 30, "it ends")
        eventually(whole, READY_S, "engine and front ends are there again")
        on.finish("b2", timeout_s=150)
        on.settled("b2", simulated=False)
        before = {each.pid: command_of(each) for each in processes_of(worker)}
        assert worker.stop() == 0
        # multiprocessing's resource trackers end once those that use them have ended.
        eventually(lambda: not processes_of(worker), GONE_S, f"the end of all of {before}")
