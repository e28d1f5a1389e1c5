"""What a worker tells the person who starts and stops it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from kit.protocol.lessee import QUEUE, chat, submit_batch
from kit.stacks.celery_side import client_app

from contract.redis.batches import BatchStore
from contract.version import version
from demo.stack import ROOT, Worker, environment_of, eventually

CELERY = str(Path(sys.executable).parent / "celery")
BARE = [CELERY, "-A", "worker.app", "worker", "--pool=solo"]
STARTED = [sys.executable, "-m", "worker"]


def environment(url: str, **settings: object) -> dict[str, str]:
    """Return an environment for a worker with the simulated engine."""
    settings = {"redis_url": url, "engine": "simulated", "simulated_latency_s": 0} | settings
    return environment_of(settings) | {"PYTHONPATH": str(ROOT)}


@contextmanager
def running(
    words: list[str], url: str, log: Path, cwd: Path = ROOT, **settings: object
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a worker's command in a process group of its own, until it is ready."""
    with log.open("ab") as file:
        process = subprocess.Popen(
            words, cwd=cwd, env=environment(url, **settings),
            stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip
    try:
        eventually(lambda: " ready in " in log.read_text() or process.poll() is not None, 20)
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run(
    words: list[str], url: str, cwd: Path = ROOT, **settings: object
) -> subprocess.CompletedProcess[str]:
    """Run a command that ends by itself."""
    return subprocess.run(
        words, cwd=cwd, env=environment(url, **settings), text=True, timeout=30, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


@pytest.mark.parametrize("words", [BARE, STARTED], ids=["celery", "warmq-worker"])
def test_a_worker_shows_what_it_is_and_when_it_is_ready_at_the_default_level(
    redis_url: str, tmp_path: Path, words: list[str]
) -> None:
    log = tmp_path / "worker.log"
    with running(words, redis_url, log, model="models/some") as process:
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(20) == 0
    text = log.read_text()
    assert text.startswith(f"warmq {version()}\n")
    assert re.search(rf"  worker +warmq-[0-9a-f]{{6}}@\S+, process {process.pid}\n", text)
    assert "  engine  simulated\n  model   models/some\n  queue   warmq\n" in text
    assert f"  Redis   {redis_url}\n" in text
    assert "Then it answers what is submitted to its queue" in text
    assert re.search(r"ready in [\d.]+ s: simulated from queue warmq, 64 requests at once", text)
    assert "concurrency" not in text
    assert "warmq-control" not in text


def test_the_banner_hides_the_password(redis_url: str) -> None:
    url = redis_url.replace("redis://", "redis://:s3cret@")
    done = run([*BARE, "-Q", "mine"], url)  # refused before it connects
    assert "s3cret" not in done.stdout


def test_two_workers_on_one_host_have_different_names_and_both_answer(
    redis_url: str, tmp_path: Path
) -> None:
    logs = tmp_path / "a.log", tmp_path / "b.log"
    app = client_app(redis_url)
    with running(STARTED, redis_url, logs[0]), running(BARE, redis_url, logs[1]):
        replies = eventually(
            lambda: found if len(found := app.control.inspect(timeout=2, limit=2).ping() or {}) > 1
            else None,
            20,
            "both answer",
        )  # fmt: skip
    app.close()
    assert replies is not None
    shown = {re.search(r"worker +(\S+),", log.read_text())[1] for log in logs}  # type: ignore[index]
    assert set(replies) == shown
    assert not any("Duplicate" in log.read_text() for log in logs)


def test_a_name_and_a_level_that_are_given_win(redis_url: str, tmp_path: Path) -> None:
    done = run([*STARTED, "-n", "mine@%h", "-l", "ERROR", "-Q", "x"], redis_url)
    assert "do not use -Q" in done.stdout
    log = tmp_path / "worker.log"
    with running([*STARTED, "-n", "mine@%h"], redis_url, log):
        assert re.search(r"worker +mine@\S+, process", log.read_text())


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (BARE[:-1], "start the worker with --pool=solo, as `warmq-worker` does"),
        ([*BARE[:-1], "--pool=threads"], "start the worker with --pool=solo"),
        ([*BARE, "-Q", "mine"], "do not use -Q: the drain takes its queue from WARMQ_QUEUE"),
    ],
    ids=["no pool", "another pool", "-Q"],
)
def test_options_that_cannot_work_are_refused_in_one_line(
    redis_url: str, words: list[str], part: str
) -> None:
    done = run(words, redis_url)
    assert done.returncode == 1
    assert done.stdout.startswith(part)
    assert done.stdout.count("\n") == 1


def test_a_misspelt_option_is_told_with_a_command_that_there_is(redis_url: str) -> None:
    done = run([*STARTED, "--pol=solo"], redis_url)
    assert done.returncode == 2
    assert "Try 'celery worker --help' for help." in done.stdout


@pytest.mark.parametrize(
    ("option", "part"), [("--help", "WARMQ_MODEL=models/tiny"), ("--version", version())]
)
def test_help_and_version_need_neither_redis_nor_settings(
    tmp_path: Path, option: str, part: str
) -> None:
    done = run([*STARTED, option], "redis://127.0.0.1:1/0", tmp_path, engine="none")
    assert done.returncode == 0
    assert part in done.stdout


def test_a_folder_with_a_worker_of_its_own_does_not_matter(redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "worker").mkdir()
    (tmp_path / "worker" / "__init__.py").write_text("raise SystemExit('not this one')\n")
    script = tmp_path / "warmq-worker"  # as an installer writes it
    script.write_text("from worker.tools.start import main\nmain()\n")
    folder = tmp_path / "bin"
    folder.mkdir()
    script = script.rename(folder / "warmq-worker")
    with running([sys.executable, str(script)], redis_url, tmp_path / "log", cwd=tmp_path):
        assert " ready in " in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("signals", "code", "first"),
    [
        ([signal.SIGINT], 1, "stopping: 4 requests in flight may finish within 25 s"),
        ([signal.SIGTERM], 0, "stopping: 4 requests in flight may finish within 25 s"),
        ([signal.SIGQUIT], 0, "stopping now: 4 requests in flight are handed back"),
    ],
    ids=["SIGINT", "SIGTERM", "SIGQUIT"],
)
def test_a_stop_takes_three_lines_when_all_processes_get_the_signal(
    redis_url: str,
    store: BatchStore,
    tmp_path: Path,
    signals: list[int],
    code: int,
    first: str,
) -> None:
    """A terminal sends Ctrl-C to the worker and its engine alike."""
    log = tmp_path / "worker.log"
    bodies = [chat(f"{n}", user="simulate:sleep=3") for n in range(4)]
    submit_batch(store, bodies=bodies)
    process_too = {"simulated_process": True, "simulated_slots": 4}
    with running(STARTED, redis_url, log, **process_too) as process:
        eventually(lambda: started(store) == 4, 20, "they run")
        for sig in signals:
            # SIGTERM is a service manager's, which is told to send it to the worker alone
            (os.kill if sig == signal.SIGTERM else os.killpg)(process.pid, sig)
        assert process.wait(20) == code
    told = log.read_text().partition(" stopping")[2].splitlines()
    assert f"stopping{told[0]}".startswith(first)
    ended = 0 if signals == [signal.SIGQUIT] else 4
    assert told[1].endswith(
        f"drained: {ended} requests have ended, {4 - ended} are back in the queue"
    )
    assert [line.rpartition("] ")[2] for line in told[2:]] == ["stopped"]
    batch = store.batch("b1")
    assert batch is not None
    assert batch.number("completed") == ended


def started(store: BatchStore) -> int:
    """Return how many requests the one worker holds."""
    return sum(worker["in_flight"] for worker in store.announcements(QUEUE))


def test_ctrl_c_twice_hands_back_at_once_and_says_so(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    log = tmp_path / "worker.log"
    submit_batch(store, bodies=[chat(f"{n}", user="simulate:sleep=600") for n in range(4)])
    with running(STARTED, redis_url, log, simulated_slots=4, drain_timeout_s=300) as process:
        eventually(lambda: started(store) == 4, 20, "they run")
        os.killpg(process.pid, signal.SIGINT)
        eventually(lambda: "stopping: 4 requests" in log.read_text(), 10, "it drains")
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(20) == 1
    text = log.read_text()
    assert "stopping now: 4 requests in flight are handed back" in text
    assert "drained: 0 requests have ended, 4 are back in the queue" in text
    assert "Traceback" not in text


def test_the_announcement_names_the_version(
    redis_client: redis.Redis, redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    with running(STARTED, redis_url, tmp_path / "log"):
        (found,) = eventually(lambda: store.announcements(QUEUE), 10, "it announces itself")
    assert found["version"] == version()


def test_ctrl_c_without_redis_ends_the_worker_in_a_few_lines(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    with running(STARTED, "redis://127.0.0.1:1/0", log) as process:
        eventually(lambda: "Error 111" in log.read_text(), 20, "it misses Redis")
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(40) == 1
    told = log.read_text().partition("stopping: ")[2]
    assert "Traceback" not in told
    assert told.count("\n") <= 8, told


def test_worker_is_used_by_the_procfile(redis_url: str, tmp_path: Path) -> None:
    with Worker(redis_url, tmp_path / "log", engine="simulated") as worker:
        eventually(lambda: " ready in " in worker.log_path.read_text(), 20)
        assert worker.log_path.read_text().startswith(f"warmq {version()}\n")
        assert worker.stop() == 0
