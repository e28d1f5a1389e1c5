"""Workers on hosts that are unlike others: names of any script, locales, streams that are shut."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import redis
from kit.protocol.lessee import chat
from kit.stacks.celery_side import client_app, send, stats
from kit.stacks.odd_host import OddHostWorker

from contract.redis import keys
from demo.stack import ROOT, eventually

#: A C locale that Python does not take for UTF-8.
ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
STREAM_CASES = ["2>&-", "1>&-", "1>&- 2>&-", "0<&- 1>&- 2>&-", ">/dev/full", "2>/dev/full"]


def serves(worker: OddHostWorker, url: str) -> None:
    """Have the worker answer a request and control commands, and stop as it should."""
    with client_app(url) as app, worker:
        assert send(app, chat()).get(timeout=30)["object"] == "chat.completion"
        eventually(lambda: stats(app).get("state") == "ready", 20, "control answers", 0.2)
        assert worker.stop(30) == 0


@pytest.mark.parametrize(
    ("name", "announced"),
    [
        ("작업자1@h", "작업자1@h"),
        ("gpu 0@h", "gpu 0@h"),
        ("warmq@김철수-PC", "warmq@김철수-PC"),
        ("a\nb@h", "a?b@h"),
        ("100%@h/x", "100%@h/x"),
        ("w@\udcff", "w@\ufffd"),
    ],
)
def test_a_worker_with_any_name_serves(
    redis_url: str, redis_client: redis.Redis, tmp_path: Path, name: str, announced: str
) -> None:
    log = tmp_path / "log"
    with (
        client_app(redis_url) as app,
        OddHostWorker(redis_url, log, "-n", name, front_ends=2, log_format="json") as worker,
    ):
        assert send(app, chat()).get(timeout=30)["object"] == "chat.completion"
        eventually(lambda: stats(app).get("state") == "ready", 20, "control answers", 0.2)
        told = [one.decode() for one in redis_client.hkeys(keys.WORKERS)]
        assert {one.rsplit(".", 2)[0] for one in told} == {announced}
        assert worker.stop(30) == 0
    assert all(json.loads(line) for line in log.read_text().splitlines())


@pytest.mark.parametrize("env", [{"PYTHONIOENCODING": "ascii"}, ASCII], ids=["io", "locale"])
def test_a_worker_of_an_ascii_terminal_serves(
    redis_url: str, tmp_path: Path, env: dict[str, str]
) -> None:
    serves(OddHostWorker(redis_url, tmp_path / "log", "-n", "작업자@%h", env=env), redis_url)


@pytest.mark.parametrize("streams", STREAM_CASES)
def test_a_worker_whose_streams_are_shut_serves(
    redis_url: str, tmp_path: Path, streams: str
) -> None:
    serves(OddHostWorker(redis_url, tmp_path / "log", streams=streams), redis_url)


@pytest.mark.parametrize(("streams", "shown"), [("2>&-", "b"), ("1>&- 2>&-", ""), ("1>&-", "")])
def test_the_number_of_a_shut_stream_may_be_a_librarys(streams: str, shown: str) -> None:
    # libffi keeps a file open from the first import of ctypes.
    code = (
        "import os, sys; mine = [os.open(sys.executable, os.O_RDONLY) for _ in range(3)];"
        "from worker.process.program import open_streams; open_streams();"
        "print('b', file=sys.stderr); print('a', file=sys.__stdout__); sys.stderr.flush();"
        "assert all(os.pread(one, 4, 0) == b'\\x7fELF' for one in mine)"
    )
    script = f'exec "$@" {streams}'
    done = subprocess.run(
        ["bash", "-c", script, "bash", sys.executable, "-c", code],
        stdout=subprocess.PIPE, cwd=ROOT, check=False, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout.replace("a", "").strip()) == (0, shown)


@pytest.mark.parametrize("streams", [">/dev/full", "2>/dev/full", ">/dev/full 2>&1"])
def test_what_a_full_disk_does_not_take_does_not_change_the_exit_status(streams: str) -> None:
    # A library may write anything, at any time.
    code = (
        "import sys; from worker.process.program import open_streams; open_streams();"
        "[stream.write('text') for stream in (sys.stdout, sys.stderr)]; sys.exit(3)"
    )
    script = f'exec "$@" {streams}'
    words = ["bash", "-c", script, "bash", sys.executable, "-c", code]
    env = os.environ | {"PYTHONUNBUFFERED": ""}
    done = subprocess.run(words, cwd=ROOT, env=env, check=False, capture_output=True)
    assert done.returncode == 3


def test_without_an_error_stream_the_log_goes_to_the_other(redis_url: str, tmp_path: Path) -> None:
    serves(OddHostWorker(redis_url, tmp_path / "log", streams="2>&-"), redis_url)
    assert " ready in " in (tmp_path / "log").read_text()


def test_a_refusal_is_read_where_there_is_a_place_for_it(tmp_path: Path) -> None:
    worker = OddHostWorker("http://nowhere", tmp_path / "log", streams="2>&-").start()
    assert worker.process is not None
    assert worker.process.wait(20) == 1
    assert "WARMQ_REDIS_URL" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("streams", ["", ">/dev/full", "0<&- 2>&-"])
def test_sighup_starts_another_worker_in_the_same_process(
    redis_url: str, redis_client: redis.Redis, tmp_path: Path, streams: str
) -> None:
    worker = OddHostWorker(redis_url, tmp_path / "log", "-n", "작업자@h", streams=streams)
    with client_app(redis_url) as app, worker:
        assert send(app, chat()).get(timeout=30)
        (first,) = eventually(lambda: redis_client.hkeys(keys.WORKERS), 10, "the announcement")
        os.kill(worker.pid, signal.SIGHUP)
        eventually(lambda: redis_client.hkeys(keys.WORKERS) not in ([], [first]), 30, "another")
        assert send(app, chat()).get(timeout=30)
        assert worker.stop(30) == 0


def test_children_that_a_worker_was_given_leave_no_zombies(redis_url: str, tmp_path: Path) -> None:
    """As the processes of an engine are given to the worker that SIGHUP makes of its process."""
    worker = OddHostWorker(redis_url, tmp_path / "log", before="sleep 600 & sleep 0 &")
    with client_app(redis_url) as app, worker:
        assert send(app, chat()).get(timeout=30)
        (sleeper,) = psutil.Process(worker.pid).children()
        sleeper.kill()
        eventually(lambda: not psutil.Process(worker.pid).children(), 10, "they are gone")
        assert worker.stop(30) == 0
