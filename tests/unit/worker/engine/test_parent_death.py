"""A tied process ends with its parent, whatever that one dies of, and so do its children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from demo.stack import ROOT, eventually
from worker.engine.parent_death import ASK_FIRST_ENV, startup_code

#: A worker, its engine, and a process that the engine starts; each says that it runs.
PROGRAM = """
import multiprocessing, os, sys, threading
from worker.engine.parent_death import children_end_with_thread

def engine(context, depth):
    print(os.getpid(), flush=True)
    if depth:
        context.Process(target=engine, args=(context, depth - 1)).start()
    threading.Event().wait()

if __name__ == "__main__":
    with children_end_with_thread():
        engine(multiprocessing.get_context(sys.argv[1]), 2)
"""


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end(started: subprocess.Popen[Any]) -> None:
    """Kill all of a session that is left."""
    with suppress(ProcessLookupError):
        os.killpg(started.pid, signal.SIGKILL)
    started.wait()
    if started.stdout is not None:
        started.stdout.close()


@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.parametrize("victim", [0, 1])
def test_all_that_an_engine_has_started_ends_with_its_parent(
    method: str, victim: int, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    started = subprocess.Popen(
        [sys.executable, str(program), method], stdout=subprocess.PIPE, cwd=tmp_path, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, start_new_session=True,
    )  # fmt: skip
    assert started.stdout is not None
    try:
        pids = [int(started.stdout.readline()) for _ in range(3)]
        os.kill(pids[victim], signal.SIGKILL)
        eventually(lambda: not any(runs(pid) for pid in pids[victim:]), 5, "they end")
        assert all(runs(pid) for pid in pids[:victim])
    finally:
        end(started)


def test_an_engine_of_rbln_is_asked_to_end_and_killed_after_its_grace(tmp_path: Path) -> None:
    program = """
import os, signal, threading
from worker.engine.parent_death import end_engine_with_parent

signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
parent = os.getpid()
if os.fork() == 0:
    end_engine_with_parent(parent)
    print(os.getpid(), flush=True)
while True:
    signal.pause()
"""
    started = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=ROOT, text=True,
        env=os.environ | {ASK_FIRST_ENV: "3"}, start_new_session=True,
    )  # fmt: skip
    assert started.stdout is not None
    try:
        engine = int(started.stdout.readline())
        started.kill()
        assert started.stdout.readline() == "asked\n"
        eventually(lambda: not runs(engine), 10, "it is killed")
    finally:
        end(started)


@pytest.mark.parametrize("function", ["end_with_parent", "end_engine_with_parent"])
def test_a_parent_that_ended_before_its_child_could_ask_is_noticed(function: str) -> None:
    code = (
        f"from worker.engine.parent_death import {function}; {function}(1 << 22); print('lives on')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False, timeout=20
    )
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, b"")


def test_a_grammar_that_is_compiled_ends_with_the_process_that_forked_its_compiler() -> None:
    program = """
import os, threading
from worker.engine.vllm.grammar_process import Child

class Endless:
    def answer(self, asked):
        os.write(1, b"%d\\n" % os.getpid())
        threading.Event().wait()

child = Child(Endless())
child.give(1, None)
child.read()
"""
    started = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=ROOT, start_new_session=True
    )
    assert started.stdout is not None
    child = int(started.stdout.readline())
    try:
        started.kill()
        eventually(lambda: not runs(child), 5, "it ends")
    finally:
        end(started)


def test_the_code_of_this_process_runs_although_others_are_found_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "worker").mkdir()
    (tmp_path / "worker" / "__init__.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(p for p in sys.path if p != str(ROOT))])
    code = startup_code("end_with_parent") + "import worker; print(worker.__file__)"
    told = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, stdout=-1, check=True)
    assert Path(told.stdout.decode().strip()).parent == ROOT / "worker"
