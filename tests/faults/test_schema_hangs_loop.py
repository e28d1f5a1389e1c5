"""A JSON schema hangs the event loop of a worker with vLLM: the process ends and is replaced.

The worker refuses large constraints and compiles all others in a process of its own, so nothing
that a client sends does this. A plugin of vLLM's, which only this test installs, takes both away.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kit.protocol.lessee import chat
from kit.stacks.hanging import exit_codes, hung_processes, supervised
from kit.stacks.stage import stage
from kit.stacks.started_as import KINDS

from demo.stack import ROOT

#: xgrammar takes minutes for it, without Python's lock; vLLM calls it on the loop.
WIDE = {"type": "string", "pattern": "^[a-z]{0,50000}$"}
PLUGIN = """
def register():
    from contract.openai import lines
    from worker.engine.vllm.grammars import Grammars
    lines.refuse_large = lambda *_: None
    Grammars.guard = lambda self, engine: None
"""


def install_plugin(folder: Path) -> dict[str, str]:
    """Return the environment in which vLLM loads a plugin that compiles constraints on the loop."""
    described = folder / "unbounded-1.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: unbounded\nVersion: 1\n")
    (described / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nunbounded = unbounded:register\n"
    )
    (folder / "unbounded.py").write_text(PLUGIN)
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("kind", "front_ends"),
    [("celery", 1), pytest.param("warmq-worker", 2, marks=pytest.mark.slow)],
)
def test_a_schema_that_hangs_the_loop_becomes_a_dead_letter(
    kind: str, front_ends: int, tmp_path: Path
) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "wide", "schema": WIDE}}
    with stage(tmp_path) as on:
        bodies = [chat(f"question {n}", max_tokens=4) for n in range(20)]
        bodies[3]["response_format"] = schema
        on.submit(bodies)
        env = install_plugin(tmp_path)
        with supervised(
            on, on.real_worker, env=env, kind=KINDS[kind], front_ends=front_ends, max_deaths=1
        ):
            on.finish(timeout_s=300)
        assert set(exit_codes(on)) <= {1}
        assert len(hung_processes(on)) >= 2
        logs = "".join(worker.log_path.read_text() for worker in on.workers)
        assert "xgrammar" in logs, "the loop's stack"
        (letter,) = on.store.dead_letters()
        assert letter["custom_id"] == "c4"
        for worker in on.workers:
            worker.stop()
        on.settled(failed={"c4": "poison"}, simulated=False)
