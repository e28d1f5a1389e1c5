"""`submit --reuse`: its cost where no line is known, and its rate where all are."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import orjson
import redis
from bench.common import report
from bench.common.load import redis_cpu_s
from bench.producer_cost.submission import PRODUCER, WORDS, timed

from contract.known import answer_digest, body_hash
from contract.message import Delivery, encode_args
from contract.naming import request_id
from contract.openai.body import CHAT_URL
from contract.redis import keys
from contract.redis.batches import BatchStore
from contract.redis.known import KnownAnswer, KnownAnswers
from contract.results import success_meta
from demo.stack import RedisServer

TITLE = "producer submit --reuse, whole command; 0.5 KB prompts"
MODEL, MOST, TTL_MS, CHUNK = "m", 1_000_000, 3_600_000, 500
EXPECTED = {
    "written": "before the first run",
    "cpu_none_known": 1.03,
    "reused_per_s": 30_000,
    "why": "none known: a hash and a bit for each line, 0.35 of 12 us; known: the digest 5 us, "
    "the look-up 2 us, ENQUEUE's copy 10 us of Redis meanwhile",
}
#: `reused_per_cpu_s` counts the seconds of client and Redis together, which no other load changes.
BARS = {"cpu_none_known": 1.03, "reused_per_s": 20_000, "reused_per_cpu_s": 20_000}


def bodies(first: int, count: int) -> Iterator[dict[str, Any]]:
    """Yield greedy requests with prompts of about 0.5 KB."""
    text = (WORDS * 8)[:490]
    for number in range(first, first + count):
        content = f"{number:09d} {text}"
        yield {
            "messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 64,
        }  # fmt: skip


def write_file(path: Path, first: int, count: int) -> None:
    """Write OpenAI batch lines of greedy chats."""
    with path.open("wb") as file:
        for number, body in enumerate(bodies(first, count)):
            line = {"custom_id": f"r{number}", "method": "POST", "url": CHAT_URL, "body": body}
            file.write(orjson.dumps(line) + b"\n")


@contextmanager
def announced(server: RedisServer) -> Iterator[None]:
    """Announce a worker that notes answers, every second as a worker does."""
    state = {"state": "ready", "queue": "warmq", "protocol": 2, "identity": MODEL,
             "known_answers": MOST}  # fmt: skip
    ended = threading.Event()

    def announce() -> None:
        with server.client() as client:
            while True:
                seconds, micros = client.time()
                record = b"%d\0" % (seconds * 1000 + micros // 1000) + orjson.dumps(state)
                client.hset(keys.WORKERS, "w", record)
                if ended.wait(1):
                    return

    thread = threading.Thread(target=announce)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def answer(client: redis.Redis, batch_id: str, first: int, count: int) -> None:
    """Write an answer to each line of a batch, and note it, as a worker does."""
    store = KnownAnswers.using(BatchStore(client, ttl_ms=TTL_MS))
    numbered = enumerate(bodies(first, count), 1)
    while group := list(islice(numbered, CHUNK)):
        pipe, known = client.pipeline(transaction=False), []
        for line, body in group:
            rid = request_id(batch_id, f"r{line - 1}")
            digest = answer_digest(MODEL, CHAT_URL, body)
            delivery = Delivery("w/1", rid, "", batch_id, "", "", 0, f"r{line - 1}", line, CHAT_URL,
                                None, False, {}, {})  # fmt: skip
            said = {
                "id": f"chatcmpl-{rid}", "object": "chat.completion", "created": 1, "model": MODEL,
                "choices": [{"index": 0, "finish_reason": "stop", "logprobs": None,
                             "message": {"role": "assistant", "content": WORDS * 2}}],
                "usage": {"prompt_tokens": 90, "completion_tokens": 26, "total_tokens": 116},
            }  # fmt: skip
            timing = {"engine_s": 1.5, "attempts": 1, "queued_s": 2.5}
            meta = success_meta(delivery, orjson.dumps(said), timing, WORDS[:100], digest)
            pipe.set(keys.result_key(rid), meta)
            known.append(KnownAnswer(digest, body_hash(encode_args(orjson.dumps(body))), rid))
        pipe.execute()
        store.note("default", MOST, TTL_MS, known)


def submit(server: RedisServer, path: Path, batch_id: str, *options: str) -> dict[str, float]:
    """Submit a file; return what the command and Redis took, and how many lines were known."""
    command = [str(PRODUCER), "submit", str(path), "--batch-id", batch_id, *options]
    with server.client() as client:
        before = redis_cpu_s(client)
        found = timed(command, server.url)
        took = redis_cpu_s(client) - before
        cached = int(client.hget(keys.batch_key(batch_id), "cached") or 0)
    return found | {"cached": cached, "redis_s": took}


def clear(server: RedisServer, batch_id: str) -> None:
    """Delete a batch, so that each submit finds the same Redis."""
    with server.client() as client:
        BatchStore(client, ttl_ms=TTL_MS).delete(batch_id, force=True)


def measure(quick: bool) -> dict[str, Any]:
    """Run all repeats, interleaved; return the part's figures."""
    repeats, lines = (3, 20_000) if quick else (7, 100_000)
    figures: dict[str, list[float]] = {}

    def keep(name: str, value: float) -> None:
        figures.setdefault(name, []).append(value)

    with tempfile.TemporaryDirectory(prefix="warmq-bench-") as name:
        folder = Path(name)
        known, other, one = (folder / f"{kind}.jsonl" for kind in ("known", "other", "one"))
        write_file(known, 0, lines)
        write_file(other, lines, lines)
        write_file(one, 0, 1)
        with RedisServer(folder / "redis", "--appendonly", "no") as server, announced(server):
            submit(server, known, "known")
            with server.client() as client:
                answer(client, "known", 0, lines)
            for repeat in range(repeats):
                forms: list[tuple[str, ...]] = [(), ("--reuse",)]
                took = {}
                for options in report.in_turn(forms, repeat):
                    took[options] = submit(server, other, "b", *options)
                    clear(server, "b")
                assert took["--reuse",]["cached"] == 0
                keep("cpu_none_known", took["--reuse",]["cpu_s"] / took[()]["cpu_s"])
                keep("cpu_us_per_line", 1e6 * took[()]["cpu_s"] / lines)
                start = submit(server, one, "one")
                clear(server, "one")
                again = submit(server, known, f"again{repeat}", "--reuse")
                assert again["cached"] == lines, again
                client_s = again["cpu_s"] - start["cpu_s"]
                keep("reused_per_s", lines / (again["wall_s"] - start["wall_s"]))
                keep("reused_per_s_with_start", lines / again["wall_s"])
                keep("reused_per_cpu_s", lines / (client_s + again["redis_s"]))
                keep("cpu_us_per_reused", 1e6 * client_s / lines)
                keep("redis_us_per_reused", 1e6 * again["redis_s"] / lines)
                if repeat:
                    clear(server, f"again{repeat - 1}")
    return {
        "lines": lines,
        "reached": {name: report.spread(values, 3) for name, values in figures.items()},
    }
