"""What commit f5e998d, of protocol 1, leaves in Redis: upgrade tests begin there.

    python tests/kit/stacks/protocol_1.py      (in a checkout with its history)

The commit is checked out into a temporary git worktree, and its own `producer` and scripts run
against a private Redis. Everything there is then written to
tests/integration/contract/lua/protocol_1.json, so that the tests need no history.
The states (batch id: what is there):

    complete    2 requests answered
    failed      2 requests failed, their messages kept for `producer retry`
    poison      1 request given up as a dead letter; beside it one that could not be read
    leased      3 requests held by a worker that died, their leases ended
    cancelled   1 request answered, 2 cancelled whose messages still wait
    expired     1 request that was not started before its deadline, its message kept
    queued      3 requests wait
    open        2 requests wait, and its submit was interrupted (its `sealed` was taken away)
"""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import orjson
import redis

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

REVISION = "f5e998d"
RECORDED = ROOT / "tests/integration/contract/lua/protocol_1.json"

#: Runs in the old checkout, with its `contract` and `producer`: argv is the URL and a folder.
DRIVER = """
import json, os, subprocess, sys, time
import redis
from contract.message import read_delivery
from contract.errors import RequestFailed
from contract.results import failure_meta, success_meta
from contract.scripts import source

URL, FOLDER = sys.argv[1:]
client = redis.Redis.from_url(URL)
DATE = "2026-11-22T05:02:34+00:00"

def script(name, *args):
    return client.eval(source(name), 0, *args)

def producer(*args, status=0):
    done = subprocess.run([sys.executable, "-m", "producer", *args], text=True,
                          capture_output=True, env=os.environ | {"WARMQ_REDIS_URL": URL})
    assert done.returncode == status, (args, done.returncode, done.stderr)

def submit(batch, count, *options):
    path = os.path.join(FOLDER, batch + ".jsonl")
    with open(path, "w") as file:
        for i in range(count):
            body = {"messages": [{"role": "user", "content": f"{batch} {i}"}], "max_tokens": 4}
            line = {"custom_id": f"{batch}-{i}", "method": "POST",
                    "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(line) + "\\n")
    producer("submit", path, "--batch-id", batch, *options)

def pop(count, lease_ms=60000):
    lists = ["warmq", *(f"warmq\\x06\\x16{step}" for step in (3, 6, 9))]
    reply = script("pop", "old@host.1.0a", "warmq", count, 2**20, lease_ms, 2, 60000, DATE, 0,
                   *lists)
    found = reply[4:]
    return [read_delivery(found[i].decode(), found[i + 3]) for i in range(0, len(found), 4)]

def done(delivery, ok=True):
    answer = json.dumps({"id": "chatcmpl-1", "object": "chat.completion", "created": 1,
        "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "an old answer"},
                     "finish_reason": "stop", "logprobs": None}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}}).encode()
    if ok:
        meta = success_meta(delivery, answer, {"queued_s": 0.1})
    else:
        meta = failure_meta(delivery.request_id, RequestFailed("the attempt failed"),
                            batch=delivery.batch, custom_id=delivery.custom_id, line=delivery.line)
    script("done", "old@host.1.0a", 60000, delivery.lease, delivery.request_id, delivery.batch,
           delivery.created, "completed" if ok else "failed", int(not ok), 3, 4, meta)

submit("complete", 2)
for delivery in pop(2): done(delivery)
submit("failed", 2)
for delivery in pop(2): done(delivery, ok=False)
submit("poison", 1)
(delivery,) = pop(1)
script("bury", "old@host.1.0a", delivery.lease, "poison: the engine died", 60000, DATE)
client.lpush("warmq", b"garbage")
assert pop(1) == []
submit("leased", 3)
assert len(pop(3, lease_ms=1)) == 3
submit("expired", 1, "--deadline", "1s")
time.sleep(1.5)
assert pop(1) == []
submit("cancelled", 3)
done(*pop(1))
producer("cancel", "cancelled")
submit("queued", 3)
submit("open", 2)
client.hdel("warmq:batch:open", "sealed")
"""


def run_old(url: str, checkout: Path) -> None:
    """Fill a Redis as the module's text says, with the code of an old checkout."""
    with tempfile.TemporaryDirectory() as folder:
        env = {n: v for n, v in os.environ.items() if not n.startswith("WARMQ_")}
        subprocess.run(
            [sys.executable, "-c", DRIVER, url, folder],
            cwd=checkout, env=env | {"PYTHONPATH": str(checkout)}, check=True, timeout=100,
        )  # fmt: skip


def snapshot(client: redis.Redis) -> dict[str, list[Any]]:
    """Return all keys: type and value. Text as it is, other bytes as {"base64": ...}."""
    found: dict[str, list[Any]] = {}
    for key in sorted(client.keys()):
        kind = client.type(key).decode()
        value: Any = {
            "string": lambda key=key: _text(client.get(key)),
            "list": lambda key=key: [_text(one) for one in client.lrange(key, 0, -1)],
            "hash": lambda key=key: [[_text(n), _text(v)] for n, v in client.hgetall(key).items()],
            "zset": lambda key=key: [
                [_text(n), score] for n, score in client.zrange(key, 0, -1, withscores=True)
            ],
        }[kind]()
        found[key.decode()] = [kind, value]
    return found


def restore(client: redis.Redis, recorded: dict[str, list[Any]]) -> None:
    """Put back what `snapshot` returned."""
    for key, (kind, value) in recorded.items():
        if kind == "string":
            client.set(key, _bytes(value))
        elif kind == "list":
            client.rpush(key, *map(_bytes, value))
        elif kind == "hash":
            client.hset(key, mapping={_bytes(n): _bytes(v) for n, v in value})
        else:
            client.zadd(key, {_bytes(n): score for n, score in value})


def _text(raw: bytes) -> Any:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(raw).decode()}


def _bytes(value: Any) -> bytes:
    return base64.b64decode(value["base64"]) if isinstance(value, dict) else value.encode()


def recording() -> dict[str, list[Any]]:
    """Return what the old commit's code leaves in an empty Redis."""
    from bench.versus import checked_out

    from demo.stack import RedisServer

    with (
        tempfile.TemporaryDirectory() as folder,
        checked_out(REVISION) as checkout,
        RedisServer(Path(folder), "--appendonly", "no") as server,
        server.client() as client,
    ):
        run_old(server.url, checkout)
        return snapshot(client)


def main() -> None:
    """Make the recording anew."""
    RECORDED.write_bytes(orjson.dumps(recording(), option=orjson.OPT_INDENT_2) + b"\n")


if __name__ == "__main__":
    main()
