"""Worker, producer and `celery inspect` run under the users of docs/how-to/security.md."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from kit.commands.support import (
    chat_line,
    producer_command,
    producer_env,
    run_producer,
    write_lines,
)
from kit.protocol.lessee import celery_message, chat
from kit.redis_servers.debian_redis import debian_redis
from kit.redis_servers.outage import celery_inspect, finished, in_flight, simulated, starts

from contract import naming
from contract.redis import keys
from contract.redis.batches import BatchStore
from contract.redis.scripts import source
from demo.stack import (
    ROOT,
    RedisServer,
    bundled_redis,
    chosen_redis,
    eventually,
    redis_binary,
)

pytestmark = pytest.mark.timeout(150)

PASSWORD = "s3cr3t-of-this-test"


def documented() -> dict[str, list[str]]:
    """Return the rules in docs/how-to/security.md by user."""
    text = (ROOT / "docs/how-to/security.md").read_text()
    found = re.findall(r"^user (\S+) (.*)$", text, re.MULTILINE)
    return {user: rules.split() for user, rules in found}


def servers() -> list[Any]:
    """Return the one chosen for this test run, else the two that are at hand."""
    if chosen_redis():
        return [pytest.param(redis_binary, id="chosen")]
    return [
        pytest.param(bundled_redis, id="bundled", marks=pytest.mark.slow),
        pytest.param(debian_redis, id="distribution"),
    ]


@pytest.fixture(params=servers())
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisServer]:
    """Return a Redis that lets in the documented users only, and the test's administrator."""
    choose: Callable[[], str] = request.param
    with RedisServer(tmp_path / "redis", "--appendonly", "no", binary=choose()) as server:
        client = server.client()
        for user, rules in documented().items():
            words = [rule.replace("CHANGE-ME", PASSWORD) for rule in rules]
            client.execute_command("ACL", "SETUSER", user, *words)
        yield server


def url_of(server: RedisServer, user: str) -> str:
    """Return the URL of one user."""
    return f"redis://{user}:{PASSWORD}@127.0.0.1:{server.port}/0"


def refused(client: redis.Redis) -> list[str]:
    """Return what Redis's own log says was refused, without CLIENT SETINFO."""
    entries: list[dict[str, Any]] = client.acl_log()
    told = [f"{e['username']}: {e['reason']} {e['object']}" for e in entries]
    return [line for line in told if not line.endswith(("command client", "client|setinfo"))]


def test_everything_runs_under_the_documented_users(server: RedisServer, tmp_path: Path) -> None:
    client = server.client()
    store = BatchStore(client, ttl_ms=60_000)
    producer_url, worker_url = (url_of(server, f"warmq-{who}") for who in ("producer", "worker"))

    def producer(*words: str | Path, status: int = 0) -> str:
        done = run_producer(*words, redis_url=producer_url)
        assert done.returncode == status, done.stderr
        return done.stdout

    lines = [
        chat_line("good", "q"),
        b"no JSON",
        chat_line("bad", "q", user="simulate:fail"),
        chat_line("kills", "q", user="simulate:die"),
    ]
    file = write_lines(tmp_path / "in.jsonl", lines)
    long = write_lines(tmp_path / "long.jsonl", [chat_line("slow", user="simulate:sleep=600")])
    settings = {"lease_s": 2, "simulated_slots": 8, "rebuild_tries": 9, "result_ttl_s": 60}
    with simulated(worker_url, tmp_path, **settings) as worker:
        producer("submit", file, "--batch-id", "b1", "--wait", status=1)
        # One hears of messages, one of online requests.
        eventually(lambda: client.info("clients")["tracking_clients"] == 2, 10, "two")
        producer("results", "b1", status=1)
        producer("status", "b1", "--request", "good")
        producer("list")
        producer("doctor")
        producer("retry", "b1")
        finished(store, "b1")
        producer("dead", "list")
        producer("dead", "retry", "--all")
        finished(store, "b1")
        before = sum(starts(tmp_path).values())
        producer("submit", long, "--batch-id", "b2")
        in_flight(tmp_path, len(starts(tmp_path)))
        eventually(lambda: sum(starts(tmp_path).values()) > before, 20, "the slow one runs")
        words = producer_command("watch", "b2", "--request", "slow", "--stream")
        with subprocess.Popen(
            words, env=producer_env(producer_url), stdout=subprocess.PIPE
        ) as watching:
            assert watching.stdout is not None
            assert watching.stdout.read(10) == b"simulated "
            producer("cancel", "b2")
            assert watching.wait(20) == 1
        producer("delete", "b2")
        good = write_lines(tmp_path / "good.jsonl", lines[:1])
        producer("run", good, tmp_path / "answers.jsonl")
        client.lpush(naming.DEFAULT_QUEUE, b"junk", celery_message("t1", chat("plain")))
        eventually(lambda: client.exists(keys.result_key("t1")), 20, "a plain Celery request")
        for words in (("stats",), ("active",)):
            env = producer_env(worker_url, WARMQ_ENGINE="simulated")
            done = celery_inspect(env, *words, "--timeout", "10", of=worker)
            assert done.returncode == 0, (refused(client), done.stdout + done.stderr)
            assert PASSWORD not in done.stdout + done.stderr
        worker.kill()  # and its leases are swept
    with simulated(worker_url, tmp_path, **settings) as worker:
        producer("submit", write_lines(file, lines[:3]), "--batch-id", "b3", "--wait", status=1)
        assert worker.stop() == 0
    assert refused(client) == []
    assert PASSWORD not in (tmp_path / "worker.log").read_text()


def test_a_worker_may_share_a_server_that_people_use(server: RedisServer) -> None:
    client = redis.Redis.from_url(url_of(server, "warmq-worker"))
    share = client.register_script(source("server_share"))
    for lease_ms in (5000, 0):
        share(args=["host:8000", "w1", lease_ms, 1, 3, 2, 1, 50, 7, "{}", "m", "0.02 0.01"])
    assert refused(server.client()) == []


@pytest.mark.parametrize("user", ["warmq-worker", "warmq-producer"])
def test_the_users_may_not_touch_what_is_not_warmqs(server: RedisServer, user: str) -> None:
    client = redis.Redis.from_url(url_of(server, user))
    for command in (
        "FLUSHALL", "KEYS *", "CONFIG GET *", "SET other 1", "GET other", "BGSAVE",
        "SUBSCRIBE other", "ACL LIST", "SHUTDOWN", "MONITOR", "SCRIPT FLUSH", "REPLICAOF NO ONE",
    ):  # fmt: skip
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.execute_command(*command.split())


def test_a_wrong_password_is_told_as_such(server: RedisServer, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "in.jsonl", [chat_line("one")])
    url = url_of(server, "warmq-producer").replace(PASSWORD, "wr0ng-password")
    done = run_producer("submit", file, redis_url=url)
    assert done.returncode == 3
    assert "check user, password and ACL" in done.stderr
    assert "wr0ng-password" not in done.stderr
