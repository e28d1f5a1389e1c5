"""Only JSON is read; secrets stay out of logs, help, errors, process lists and `inspect`."""

from __future__ import annotations

import base64
import pickle
import subprocess
from collections.abc import Iterator
from pathlib import Path

import orjson
import psutil
import pytest
import yaml
from kit.commands.support import batch_file, producer_command, producer_env, run_producer
from kit.protocol.lessee import celery_message, chat, stored
from kit.redis_servers.outage import (
    celery_inspect,
    finished,
    inspect,
    simulated,
    store_of,
    submit_sleepers,
)

from contract import naming
from demo.stack import ROOT, RedisServer, Worker, eventually
from worker.engine.vllm_settings import VllmSettings
from worker.process.bootstep import CONTROL_QUEUE

pytestmark = pytest.mark.timeout(120)

PASSWORD = "hunter2/with@signs"
QUOTED = "hunter2%2Fwith%40signs"


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


def pickled(payload: object, **headers: object) -> bytes:
    """Return a message with a pickled body, as Celery writes it with serializer=pickle."""
    message = orjson.loads(celery_message("bomb", chat()))
    message["headers"] |= headers
    message["body"] = base64.b64encode(pickle.dumps(payload)).decode()
    message["content-type"] = "application/x-python-serialize"
    message["content-encoding"] = "binary"
    message["properties"]["body_encoding"] = "base64"
    return orjson.dumps(message)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """Return a Redis of this test's own."""
    with RedisServer(tmp_path / "redis", "--appendonly", "no") as server:
        yield server


def test_a_pickle_is_refused_wherever_it_comes_in_and_never_unpacked(
    server: RedisServer, tmp_path: Path
) -> None:
    client, store, spoilt = server.client(), store_of(server), tmp_path / "unpickled"
    bomb = Bomb(spoilt)
    assert pickle.loads(pickle.dumps(bomb)) is None and spoilt.exists(), "the bomb works"
    spoilt.unlink()
    with simulated(server.url, tmp_path) as worker:
        assert inspect(server.url)["warmq"]["state"] == "ready"
        client.lpush(naming.DEFAULT_QUEUE, pickled([[bomb], {}, {}]), pickle.dumps(bomb))
        # A task that Celery knows, so that it would look at the body if it took one.
        known = pickled([[bomb], {}, {}], id="bomb2", task="celery.backend_cleanup")
        client.lpush(CONTROL_QUEUE, known)
        client.publish("/0.celery.pidbox", pickled({"method": "ping", "arguments": bomb}))
        meta = eventually(lambda: stored(client, "bomb"), 20, "the pickled request has failed")
        assert "only application/json is accepted" in meta["warmq"]["error"]["message"]
        assert [letter["reason"] for letter in store.dead_letters()] == ["not a JSON object"]
        submitted, _ = submit_sleepers(store, [0.01] * 4)
        finished(store, submitted.id)
        assert inspect(server.url)["warmq"]["state"] == "ready"
        assert worker.process is not None and worker.process.poll() is None
        assert worker.stop() == 0
    assert not spoilt.exists()


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[RedisServer]:
    """Return a Redis with a password; `url` has it, percent-encoded."""
    options = ("--appendonly", "no", "--requirepass", PASSWORD)
    with RedisServer(tmp_path / "redis", *options) as server:
        server.url = f"redis://:{QUOTED}@127.0.0.1:{server.port}/0"
        yield server


def assert_silent(*texts: str) -> None:
    """No text has the password in any of its forms."""
    for text in texts:
        for secret in (PASSWORD, QUOTED, "hunter2"):
            assert secret not in text


def command_line(process: subprocess.Popen[bytes]) -> str:
    """Return what a process list shows of a process and its children."""
    family = psutil.Process(process.pid)
    return "\n".join(" ".join(p.cmdline()) for p in (family, *family.children(recursive=True)))


def test_the_worker_shows_its_password_nowhere(guarded: RedisServer, tmp_path: Path) -> None:
    env = producer_env(guarded.url, WARMQ_ENGINE="simulated")
    with simulated(guarded.url, tmp_path) as worker:
        inspect(guarded.url)
        for word in ("stats", "conf"):
            done = celery_inspect(env, word, "--timeout", "10", of=worker)
            assert done.returncode == 0, done.stderr
            assert_silent(done.stdout, done.stderr)
        assert worker.process is not None
        assert_silent(command_line(worker.process))
        guarded.stop()  # what it says about an outage is of interest too
        eventually(lambda: b"Trying again" in worker.log_path.read_bytes(), 20, "it has noticed")
        guarded.start()
        worker.stop()
    assert_silent(worker.log_path.read_text())


def test_the_producer_shows_its_password_nowhere(guarded: RedisServer, tmp_path: Path) -> None:
    file = batch_file(tmp_path / "in.jsonl", 3)
    url = guarded.url
    with subprocess.Popen(
        producer_command("submit", file, "--batch-id", "b1", "--wait"), env=producer_env(url),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as submit:  # fmt: skip
        assert_silent(command_line(submit))
        submit.terminate()
        assert submit.stdout is not None
        assert_silent(submit.stdout.read().decode())
    for words in (("--help",), ("submit", "--help"), ("list",), ("status", "b1", "--json")):
        done = run_producer(*words, redis_url=url)
        assert_silent(done.stdout, done.stderr)
    wrong = url.replace(f":{guarded.port}", ":1")
    bad = [wrong, url.replace("redis://", "http://"), f"redis://:{PASSWORD}@127.0.0.1:1/0"]
    for broken in (*bad, url.replace("%2Fwith", "-wrong")):
        done = run_producer("list", redis_url=broken)
        assert done.returncode in (2, 3)
        assert_silent(done.stdout, done.stderr)
    for broken in bad[1:]:
        asked = celery_inspect(producer_env(broken), "ping", "--timeout", "1")
        assert asked.returncode != 0
        assert_silent(asked.stdout, asked.stderr)


def test_a_worker_with_a_wrong_url_says_so_without_showing_it(tmp_path: Path) -> None:
    worker = Worker(f"http://:{PASSWORD}@127.0.0.1:1/0", tmp_path / "w.log", engine="simulated")
    with worker:
        assert worker.process is not None
        assert worker.process.wait(30) != 0
    text = (tmp_path / "w.log").read_text()
    assert "WARMQ_REDIS_URL: must start with" in text
    assert_silent(text)


@pytest.mark.slow
def test_remote_code_is_trusted_only_on_request() -> None:
    from worker.engine.vllm.arguments import parse_engine_args

    def trusts(words: str) -> object:
        settings = VllmSettings(model=str(ROOT / "models" / "tiny"), engine_args=words)
        return parse_engine_args(settings).trust_remote_code

    assert trusts("--max-num-seqs 4") is False
    assert trusts("--trust-remote-code") is True


def test_compose_keeps_redis_in_its_own_network_behind_a_password() -> None:
    files = [path for path in (ROOT / "compose").glob("*.y*ml") if "services" in path.read_text()]
    assert files
    for path in files:
        described = yaml.safe_load(path.read_text())
        server = described["services"].get("redis", {})
        assert "ports" not in server and "network_mode" not in server
        if not server.get("image"):
            continue  # an override of another file's service
        assert server["networks"] == ["queue"]
        assert "requirepass" in str(server["command"])
        assert "${WARMQ_REDIS_PASSWORD:?" in path.read_text(), "no password, no start"
    conf = (ROOT / "compose" / "redis.conf").read_text()
    assert "requirepass" not in conf, "no password is written down"
    assert "protected-mode yes" in conf


def test_junk_in_celerys_own_queue_and_channel_stops_no_worker(
    server: RedisServer, tmp_path: Path
) -> None:
    client, store = server.client(), store_of(server)
    with simulated(server.url, tmp_path) as worker:
        assert inspect(server.url)["warmq"]["state"] == "ready"
        for junk in (b"", b"\x80\x04junk", b"[]", b"7", b"{}", b'{"body": 1}'):
            client.lpush(CONTROL_QUEUE, junk)
            client.publish("/0.celery.pidbox", junk)
        submitted, _ = submit_sleepers(store, [0.01] * 4)
        finished(store, submitted.id)
        assert inspect(server.url)["warmq"]["state"] == "ready"
        assert client.llen(CONTROL_QUEUE) == 6
        assert worker.process is not None and worker.process.poll() is None
        assert worker.stop() == 0
