"""`producer run --local`: one command, with a private Redis and a worker that end with it."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from kit.commands.support import producer_command

from demo.stack import CPU_ENGINE_ARGS, MODEL, environment_of, eventually


class LocalRun:
    """A local run of 400 lines; all its processes have a folder of it as working directory."""

    def __init__(self, folder: Path, *options: str, lines: int = 400, **settings: object) -> None:
        self.folder, self.out = folder, folder / "out.jsonl"
        file = folder / "in.jsonl"
        if not file.exists():
            file.write_text("".join(
                json.dumps({"custom_id": f"r{n}", "prompt": f"{n} plus 1", "max_tokens": 4}) + "\n"
                for n in range(lines)
            ))  # fmt: skip
        env = environment_of(settings) | {"TMPDIR": str(folder)}
        self.process = subprocess.Popen(
            producer_command("run", "--local", file, self.out, "--window", "100", *options),
            env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def processes(self) -> list[psutil.Process]:
        """Return all living processes of this run, the command's own included."""
        found = []
        for one in psutil.process_iter():
            try:
                # Redis and Celery overwrite their environment and command line.
                ours = one.cwd().startswith(str(self.folder))
                if ours and one.status() != psutil.STATUS_ZOMBIE:
                    found.append(one)
            except psutil.Error:
                continue
        return found

    def find(self, name: str) -> psutil.Process:
        """Wait for the process of this run whose command line has this word, and return it."""
        return eventually(lambda: [p for p in self.processes() if name in _words(p)], 60, name)[0]

    def works(self) -> bool:
        """Whether the first window is done."""
        assert self.process.poll() is None
        return self.out.exists() and self.out.stat().st_size > 0

    def ended(self) -> str:
        """Wait until it and all its processes have ended; return what it printed on stderr."""
        _, told = self.process.communicate(timeout=120)
        eventually(lambda: not self.processes(), 60, "no process is left")
        return told


def _words(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


SIMULATED = {"engine": "simulated", "simulated_slots": 8, "simulated_latency_s": 0.05}


def test_a_run_ends_with_all_that_it_has_started(tmp_path: Path) -> None:
    run = LocalRun(tmp_path, lines=200, **SIMULATED)
    told = run.ended()
    assert run.process.returncode == 0, told
    assert len(run.out.read_text().splitlines()) == 200
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == []


def test_settings_of_files_go_for_its_worker_too(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("WARMQ_SERVED_MODEL_NAME=qwen\nWARMQ_REDIS_URL=redis://no:1\n")
    (tmp_path / "warmq.toml").write_text('queue = "nightly"\nengine = "simulated"\n')
    run = LocalRun(tmp_path, lines=20)
    told = run.ended()
    assert run.process.returncode == 0, told
    assert len(run.out.read_text().splitlines()) == 20


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("interrupt", "status"),
    [
        (lambda run, redis, worker: run.send_signal(signal.SIGINT), 130),
        (lambda run, redis, worker: run.terminate(), 143),
        (lambda run, redis, worker: run.kill(), -9),
        (lambda run, redis, worker: redis.kill(), 2),
        (lambda run, redis, worker: worker.kill(), 2),
    ],
    ids=["ctrl-c", "sigterm", "sigkill", "redis killed", "worker killed"],
)
def test_an_interrupted_run_leaves_no_process_and_goes_on_with_the_same_command(
    tmp_path: Path, interrupt: Callable[..., None], status: int
) -> None:
    # Four windows wait at a time, and end together: four more are left when the first is seen.
    run = LocalRun(tmp_path, lines=800, **SIMULATED | {"simulated_latency_s": 0.1})
    redis, worker = run.find("redis-server"), run.find("celeryd")
    eventually(run.works, 60, "the first window is done")
    interrupt(run.process, redis, worker)
    told = run.ended()
    assert run.process.returncode == status, told
    if status == 2:
        first, *_ = (line for line in told.splitlines() if line.startswith("producer: "))
        assert "of this run ended by SIGKILL; its log is /" in first
    again = LocalRun(tmp_path, lines=800, **SIMULATED)
    told = again.ended()
    assert again.process.returncode == 0, told
    answered = [json.loads(line)["custom_id"] for line in again.out.read_text().splitlines()]
    assert answered == [f"r{n}" for n in range(800)]


def test_a_worker_that_cannot_start_says_why(tmp_path: Path) -> None:
    run = LocalRun(tmp_path, "--model", "models/nope", lines=1, engine="vllm")
    told = run.ended()
    assert run.process.returncode == 2
    assert "the worker of this run ended with status 1; its log is /" in told
    assert "models/nope" in told.partition("its log is")[2]


def test_a_redis_that_cannot_start_says_why_and_leaves_its_log(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100)  # too long for a socket's path
    folder.mkdir()
    run = LocalRun(folder, lines=1, **SIMULATED)
    told = run.ended()
    assert run.process.returncode == 2
    _, _, log = told.partition("the Redis of this run ended with status 1; its log is ")
    assert Path(log.partition(";")[0]).exists(), told


@pytest.mark.timeout(400)
def test_one_command_answers_a_file_by_a_model(tmp_path: Path) -> None:
    run = LocalRun(tmp_path, "--model", str(MODEL), lines=8, engine_args=CPU_ENGINE_ARGS)
    _, told = run.process.communicate(timeout=390)
    assert run.process.returncode == 0, told
    lines = [json.loads(line) for line in run.out.read_text().splitlines()]
    assert [line["response"]["status_code"] for line in lines] == [200] * 8
    eventually(lambda: not run.processes(), 60, "no process is left")
