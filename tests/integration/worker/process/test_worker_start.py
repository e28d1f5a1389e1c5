"""The worker process: starts that are refused, and those that wait."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from kit.engines.setting_bounds import BOUNDS, ENGINE_OF
from kit.protocol.lessee import chat
from kit.stacks.celery_side import client_app, send, simulated, stats

from demo.stack import ROOT, RedisServer, environment_of, eventually, free_port, procfile_command

LONG = "simulate:sleep=600"


def run_worker(*words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run the worker's command to its end."""
    env = environment_of({"engine": "simulated"} | settings)
    return subprocess.run(
        [*procfile_command(), *words],
        cwd=ROOT, env=env, text=True, timeout=30, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def test_the_queue_option_is_refused_with_the_remedy(redis_url: str) -> None:
    run = run_worker("-Q", "mine", redis_url=redis_url)
    assert run.returncode != 0
    assert "do not use -Q" in run.stdout
    assert "WARMQ_QUEUE" in run.stdout


def test_another_pool_is_refused_with_the_remedy(redis_url: str) -> None:
    run = run_worker("--pool=prefork", "--concurrency=1", redis_url=redis_url)
    assert run.returncode != 0
    assert "start the worker with --pool=solo" in run.stdout


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("lease_s", "soon", "WARMQ_LEASE_S: Input should be a valid number"),
        ("lease_s", "0", "default 60"),
        (
            "engine",
            "gpu",
            "WARMQ_ENGINE: Input should be 'vllm', 'openai', 'triton' or 'simulated'",
        ),
        ("engine", "vllm", "WARMQ_MODEL=models/tiny"),
        ("engine_args", "--dtype 'float32", "WARMQ_ENGINE_ARGS: No closing quotation"),
        ("result_ttl_s", "inf", "WARMQ_RESULT_TTL_S: Input should be a finite number"),
        ("redis_url", "http://localhost", "WARMQ_REDIS_URL"),
        (
            "redis_ulr",
            "redis://h",
            "WARMQ_REDIS_ULR is not a setting; did you mean WARMQ_REDIS_URL?",
        ),
        ("max_num_seqs", "8", "WARMQ_MAX_NUM_SEQS is not a setting of warmq; see docs/"),
    ],
)
def test_wrong_settings_end_the_worker_with_the_remedy_and_no_traceback(
    redis_url: str, name: str, value: str, part: str
) -> None:
    given = {"redis_url": redis_url, "engine": ENGINE_OF.get(name, "simulated"), name: value}
    run = run_worker(**given)
    assert run.returncode != 0
    assert part in run.stdout
    assert "Traceback" not in run.stdout


# The greatest number of front ends is a machine's worth of processes to start.
@pytest.mark.timeout(300)
@pytest.mark.parametrize("which", [0, 1], ids=["least", "greatest"])
def test_the_extremes_of_every_number_start_a_worker_that_answers(
    redis_url: str, tmp_path: Path, which: int
) -> None:
    extremes = {name: values[which] for name, values in BOUNDS.items()}
    log = tmp_path / "worker.log"
    with client_app(redis_url) as app, simulated(redis_url, log, **extremes) as worker:
        assert send(app, chat()).get(timeout=120)["object"] == "chat.completion"
        assert worker.stop(120) == 0
    assert "Traceback" not in worker.log_path.read_text()


def test_a_redis_that_comes_later_is_waited_for(tmp_path: Path) -> None:
    port = free_port()
    url = f"redis://127.0.0.1:{port}/0"
    with simulated(url, tmp_path / "worker.log") as worker:
        eventually(lambda: "Error 111" in worker.log_path.read_text(), 20, "it misses Redis")
        with (
            RedisServer(tmp_path / "redis", "--appendonly", "no", port=port) as server,
            client_app(server.url) as app,
        ):
            assert send(app, chat()).get(timeout=30)["object"] == "chat.completion"
            eventually(lambda: stats(app).get("state") == "ready", 30, "control answers", 0.2)
            assert worker.stop() == 0


def test_the_password_is_nowhere_in_the_log(tmp_path: Path) -> None:
    password = "s3cret-Pa55"
    options = ("--appendonly", "no", "--requirepass", password)
    port = free_port()
    server = RedisServer(tmp_path / "redis", *options, port=port)
    url = f"redis://:{password}@127.0.0.1:{port}/0"
    with simulated(url, tmp_path / "worker.log") as worker:
        # Given it cannot reach Redis, and then can
        eventually(lambda: "Error 111" in worker.log_path.read_text(), 20, "it misses Redis")
        with server, client_app(url) as app:
            assert send(app, chat()).get(timeout=30)
            eventually(lambda: stats(app).get("state") == "ready", 30, "control answers", 0.2)
            # Then Redis goes away again
        eventually(lambda: "Redis: " in worker.log_path.read_text(), 10, "it misses Redis")
        worker.kill()
    log = worker.log_path.read_text()
    assert " ready in " in log
    assert password not in log
