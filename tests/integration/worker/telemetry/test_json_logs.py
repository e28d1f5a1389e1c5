"""The logs of real processes where JSON is asked for: every line is one object."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import redis
from kit.commands.support import producer_command, producer_env
from kit.stacks.celery_side import client_app, send, simulated

from contract.redis import keys
from demo.stack import RedisServer, eventually, free_port

FIELDS = {
    "time", "level", "logger", "process", "message", "action", "request_id", "batch_id",
    "trace_id", "exception",
}  # fmt: skip


def lines(log: Path) -> list[dict[str, Any]]:
    """Return all lines of a process that has ended."""
    found = [orjson.loads(line) for line in log.read_bytes().splitlines()]
    assert not {name for line in found for name in line} - FIELDS
    return found


def told(log: Path) -> list[str]:
    """Return what has happened so far, as the lines say it."""
    whole = log.read_bytes().rpartition(b"\n")[0] if log.exists() else b""
    return [orjson.loads(line).get("action", "") for line in whole.splitlines()]


def listeners(client: redis.Redis) -> int:
    """Return how many processes hear of cancellations."""
    return int(client.pubsub_numsub(keys.CANCEL_CHANNEL)[0][1])


@pytest.mark.parametrize("front_ends", [1, 2])
def test_every_line_of_a_worker_is_json_from_its_start_to_its_stop(
    redis_url: str, redis_client: redis.Redis, tmp_path: Path, front_ends: int
) -> None:
    log = tmp_path / "log"
    worker = simulated(redis_url, log, log_format="json", front_ends=front_ends)
    with worker, client_app(redis_url) as app:
        eventually(lambda: told(log).count("engine_ready") == front_ends, 30, "it is ready")
        # A process is ready before it listens; what is published earlier reaches nobody.
        eventually(lambda: listeners(redis_client) == front_ends, 30, "they listen")
        redis_client.publish(keys.CANCEL_CHANNEL, b"\xff\xfe{")  # no message
        eventually(lambda: told(log).count("bad_message") == front_ends, 30, "they say so")
        answer = send(app, {"prompt": "Hello", "max_tokens": 4})
        eventually(answer.ready, 30, "it is answered")
    found = lines(log)
    actions = [line.get("action") for line in found]
    assert actions[0] == "starting"
    assert actions.count("stopped") == front_ends
    assert len({line["process"] for line in found}) == front_ends
    # Celery says that it is connected, which no word of ours is for.
    assert any(line["logger"].startswith("celery") for line in found)


@contextmanager
def gateway(redis_url: str, folder: Path, log: Path, **env: str) -> Iterator[str]:
    """Run a gateway that logs to this file; give its URL."""
    port = free_port()
    found = producer_env(
        redis_url, WARMQ_LOG_FORMAT="json", WARMQ_GATEWAY_STORE=str(folder / "files"), **env
    )
    with log.open("wb") as file:
        process = subprocess.Popen(
            producer_command("serve", "--port", str(port)),
            env=found, cwd=folder, stdout=subprocess.DEVNULL, stderr=file,
        )  # fmt: skip
    try:
        eventually(lambda: b"Uvicorn running" in log.read_bytes(), 30, "it serves")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def test_every_line_of_a_gateway_is_json(redis_url: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with gateway(redis_url, tmp_path, log):
        pass
    assert {"uvicorn.error"} <= {line["logger"] for line in lines(log)}


def test_a_line_about_a_request_that_failed_has_the_ids_of_its_answer_and_of_its_trace(
    tmp_path: Path,
) -> None:
    log, trace = tmp_path / "log", "0af7651916cd43dd8448eb211c80319c"
    collector = f"http://127.0.0.1:{free_port()}"  # nobody is there
    with (
        RedisServer(tmp_path / "redis") as server,
        gateway(
            server.url, tmp_path, log, WARMQ_TRACES="0", OTEL_EXPORTER_OTLP_ENDPOINT=collector
        ) as url,
    ):
        # Who the caller is the gateway knows from before.
        assert httpx.get(f"{url}/v1/batches", timeout=60).status_code == 200
        server.stop()
        answer = httpx.get(
            f"{url}/v1/batches", headers={"traceparent": f"00-{trace}-b7ad6b7169203331-00"},
            timeout=60,
        )  # fmt: skip
    assert answer.status_code == 503
    (line,) = [line for line in lines(log) if line.get("action") == "request_error"]
    assert line["request_id"] == answer.headers["x-request-id"]
    assert line["trace_id"] == trace
