"""Commands that follow a batch wait for a Redis that is away, and say so."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kit.commands.runs import custom_ids, done_windows, journal_of, windows
from kit.commands.support import batch_file, producer_command, producer_env
from kit.redis_servers.outage import in_flight, recomputed, simulated, stay, store_of

from demo.stack import RedisServer, eventually

pytestmark = pytest.mark.timeout(150)

LINES = 16
#: Longer than the eight seconds for which every command tries again.
AWAY_S = 12
#: Options of a Redis that pauses for each key that it loads, in microseconds.
SLOWLY = ("--key-load-delay", "250")


@contextmanager
def following(server: RedisServer, *args: str | Path) -> Iterator[Following]:
    """Start a command, whose messages are read while it runs."""
    with subprocess.Popen(
        producer_command(*args), env=producer_env(server.url), text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            yield Following(process)
        finally:
            process.kill()


class Following:
    """A command that runs, and what it has said."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.said = ""

    def says(self, text: str) -> None:
        """Read its messages until one has the text."""
        assert self.process.stderr is not None
        while text not in self.said:
            line = self.process.stderr.readline()
            assert line, f"it ended without {text!r}: {self.said}"
            self.said += line

    def ends(self, timeout_s: float = 60) -> int:
        _, rest = self.process.communicate(timeout=timeout_s)
        self.said += rest
        return self.process.returncode


def commands(folder: Path) -> dict[str, list[Any]]:
    file = batch_file(folder / "in.jsonl", LINES)
    return {
        "run": ["run", file, folder / "out.jsonl"],
        "submit": ["submit", file, "-o", folder / "out.jsonl"],
        "watch": ["watch", "b1"],
        "results": ["results", "b1", "--follow", "-o", folder / "out.jsonl"],
    }


def reads(server: RedisServer) -> bool:
    """Whether a producer has read from Redis, or written to it, on an open connection."""
    last = {c["cmd"] for c in server.client().client_list() if c["name"] == "warmq-producer"}
    return bool(last & {"evalsha", "hgetall", "lrange", "mget", "time", "zrange"})


def begin(server: RedisServer, folder: Path) -> None:
    """Submit what `watch` and `results` follow."""
    words = ["submit", folder / "in.jsonl", "--batch-id", "b1"]
    done = subprocess.run(
        producer_command(*words), env=producer_env(server.url), capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["run", "submit", "watch", "results"])
def test_a_long_absence_is_waited_for_aloud(name: str, server: RedisServer, tmp_path: Path) -> None:
    args = commands(tmp_path)[name]
    if name in ("watch", "results"):
        begin(server, tmp_path)
    worker = simulated(server.url, tmp_path, simulated_slots=2, simulated_latency_s=0.5)
    with following(server, *args) as command:
        eventually(lambda: reads(server), 30, "the command reads from Redis")
        with worker:
            in_flight(tmp_path, 2)
            server.stop()
            command.says("waiting for Redis, up to")
            stay(AWAY_S)
            server.start()
            command.says("Redis is back after")
            assert command.ends() == 0, command.said
    assert "--wait-redis" not in command.said
    seconds = float(re.findall(r"Redis is back after ([\d.]+) s", command.said)[0])
    assert seconds > AWAY_S - 1
    if name != "watch":
        assert len((tmp_path / "out.jsonl").read_text().splitlines()) == LINES
    assert recomputed(tmp_path) == 0


def fill(server: RedisServer, count: int = 12_000) -> None:
    """Give Redis what it takes seconds to load with the options SLOWLY."""
    pipe = server.client().pipeline(transaction=False)
    for n in range(count):
        pipe.set(f"other:{n}", b"x")
    pipe.execute()


def test_a_redis_that_loads_its_data_is_waited_for(server: RedisServer, tmp_path: Path) -> None:
    args = commands(tmp_path)["run"]
    fill(server)
    with (
        simulated(server.url, tmp_path, simulated_slots=2, simulated_latency_s=0.3),
        following(server, *args) as command,
    ):
        in_flight(tmp_path, 2)
        server.stop()
        server.start(*SLOWLY, wait=False)
        command.says("loading the dataset")
        command.says("Redis is back after")
        assert command.ends() == 0, command.said
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == LINES


def test_a_command_that_begins_while_redis_loads_waits(server: RedisServer, tmp_path: Path) -> None:
    args = commands(tmp_path)["run"]
    fill(server, 40_000)
    server.stop()
    server.start(*SLOWLY, wait=False)
    eventually(lambda: _listens(server), 20, "it listens")
    with following(server, *args) as command:
        command.says("loading the dataset")
        command.says("Redis is back after")
        with simulated(server.url, tmp_path, simulated_latency_s=0.01):
            assert command.ends() == 0, command.said


def _listens(server: RedisServer) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", server.port)) == 0


def test_after_the_limit_it_says_how_to_go_on_and_goes_on(
    server: RedisServer, tmp_path: Path
) -> None:
    args = [*commands(tmp_path)["run"], "--wait-redis", "3s"]
    with simulated(server.url, tmp_path, simulated_slots=2, simulated_latency_s=0.3):
        with following(server, *args) as command:
            in_flight(tmp_path, 2)
            server.stop()
            assert command.ends(30) == 3
            assert re.search(r"waiting for Redis, up to 0:00:0[12] more", command.said)
            assert "the same command goes on where it stopped" in command.said
        server.start()
        with following(server, *args) as again:
            assert again.ends() == 0, again.said
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == LINES
    assert recomputed(tmp_path) == 0


def submitted(server: RedisServer) -> set[str]:
    """Return the ends of the ids of the batches that are submitted to their ends."""
    return {batch.id[-2:] for batch in windows(store_of(server)) if batch.sealed}


def test_a_run_goes_on_by_itself_after_redis_lost_its_last_writes(tmp_path: Path) -> None:
    """Started again from a snapshot, as a failover does: lines are queued again."""
    source, out = batch_file(tmp_path / "in.jsonl", 2200), tmp_path / "out.jsonl"
    with (
        RedisServer(tmp_path / "redis", "--appendonly", "no") as server,
        simulated(server.url, tmp_path, simulated_slots=32, simulated_latency_s=0.1),
        following(server, "run", source, out, "--window", "500") as command,
    ):
        eventually(lambda: journal_of(out).exists() and done_windows(out) == 1, 60)
        server.client().save()
        assert ".3" not in submitted(server)
        eventually(lambda: ".3" in submitted(server), 60, "the fourth window is submitted")
        server.stop(signal.SIGKILL)
        stay(2)
        server.start()
        assert command.ends() == 0, command.said
    assert custom_ids(out) == [f"r{n}" for n in range(2200)]
    assert "goes on where the output ends" in command.said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_wait_at_once(
    number: signal.Signals, server: RedisServer, tmp_path: Path
) -> None:
    file = batch_file(tmp_path / "in.jsonl", 60_000)
    with following(server, "submit", file, "--wait", "--batch-id", "b1") as command:
        store = store_of(server)
        eventually(lambda: (b := store.batch("b1")) and b.number("cursor") >= 500, 30)
        server.stop(signal.SIGKILL)
        command.says("waiting for Redis, up to")
        command.process.send_signal(number)
        assert command.ends(5) == (130 if number == signal.SIGINT else 143)


def test_an_address_where_nobody_answers_ends_at_once(server: RedisServer, tmp_path: Path) -> None:
    args = commands(tmp_path)["run"]
    server.stop()
    with following(server, *args) as command:
        assert command.ends(10) == 3
    assert "is Redis running, and is WARMQ_REDIS_URL right?" in command.said


@pytest.mark.parametrize("given", ["soon", "-1s", "999999999999d", "1"])
def test_a_wait_that_is_no_duration_is_refused(
    given: str, server: RedisServer, tmp_path: Path
) -> None:
    with following(server, *commands(tmp_path)["run"], "--wait-redis", given) as command:
        assert command.ends(10) == 2
    assert f"--wait-redis {given}: write a duration" in command.said
