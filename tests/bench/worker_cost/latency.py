"""How long a request waits for the worker when there is no queue, and a result for its key.

`wake` and `commit` come from the drain in a process of its own (probe.py), which
stamps when a request is about to enter the engine, when the engine has finished
it, and when Redis has confirmed the result. `answer` is the whole way through
the real worker process, seen from a client that asks for the result's key.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from typing import Any

import redis
from bench.common import report
from bench.common.load import Held, hold, wait_ready
from bench.common.probe import Probe

from contract.redis import keys
from demo.stack import RedisServer, Worker

TITLE = (
    "latency in ms: wake = sent to worker has it, commit = engine finished to result in "
    "Redis,\nanswer = sent to result read, overtake = priority 0 under a backlog to worker"
)
EXPECTED = {
    "written": "before the first run",
    "wake_ms_p50": 1.5,
    "answer_ms_p50": 3,
    "commit_idle_ms_p50": 0.7,
    "commit_64_ms_p50": 4.5,
    "commit_256_ms_p50": 5,
    "overtake_64_ms_p50": 15,
    "why": "Redis wakes the drain, POP and DONE are one round trip each; under load "
    "results linger 3 ms to share a DONE",
}
BARS = {
    "wake_ms_p50": 10,
    "commit_idle_ms_p50": 10,
    "commit_64_ms_p50": 10,
    "commit_256_ms_p50": 10,
}
#: Pauses between two requests to an idle worker, in seconds.
PAUSES_S = (0.03, 0.2)
#: How often a client looks for its result, in seconds.
LOOK_S = 0.0002
LATENCY_S = 0.2
#: As in overhead.py.
STEP_S = 0.01


def _one(client: redis.Redis, name: str, priority: int) -> Held:
    return hold(client, name, 1, priority=priority)


def wake(folder: Path, count: int) -> tuple[list[float], list[float]]:
    """Return ms from sending to the worker having it, and from engine to Redis, when idle."""
    sent: dict[str, float] = {}
    rng = random.Random(11)
    with RedisServer(folder) as server, server.client() as client:
        seen = folder / "seen.json"
        with Probe(server.url, seen, simulated_slots=64, simulated_latency_s=0) as probe:
            wait_ready(client)
            for number in range(count):
                held = _one(client, f"wake{number}", 6)
                time.sleep(rng.uniform(*PAUSES_S))
                sent[held.request_ids[0]] = time.monotonic()
                held.release()
                held.wait()
    came, waits = probe.seen["came"], probe.seen["finish_to_committed_ms"]
    return [1000 * (came[rid] - at) for rid, at in sent.items()], waits


def answer(folder: Path, count: int) -> list[float]:
    """Return ms from sending to the result's key being readable, through the real worker."""
    times = []
    rng = random.Random(12)
    with RedisServer(folder) as server, server.client() as client:
        log = folder / "worker.log"
        settings = {"simulated_slots": 64, "simulated_latency_s": 0}
        with Worker(server.url, log, engine="simulated", **settings):
            wait_ready(client)
            for number in range(count):
                held = _one(client, f"answer{number}", 6)
                key = keys.result_key(held.request_ids[0])
                time.sleep(rng.uniform(*PAUSES_S))
                began = time.monotonic()
                held.release()
                while client.get(key) is None:
                    time.sleep(LOOK_S)
                times.append(1000 * (time.monotonic() - began))
    return times


def busy(
    folder: Path, slots: int, seconds: float, step_s: float = 0.0
) -> tuple[dict[str, Any], list[float]]:
    """Return what the probe saw under a backlog, and ms for urgent requests to be running.

    The urgent ones have priority 0 and arrive while all slots and the look-ahead
    are taken: they wait for low water, then for the look-ahead before them.
    """
    sent: dict[str, float] = {}
    with RedisServer(folder) as server, server.client() as client:
        settings = {
            "simulated_slots": slots,
            "simulated_latency_s": LATENCY_S,
            "simulated_step_s": step_s,
        }
        with Probe(server.url, folder / "seen.json", **settings) as probe:
            wait_ready(client)
            backlog = hold(client, "backlog", int(slots / LATENCY_S * seconds))
            backlog.release()
            until = time.monotonic() + seconds * 0.8
            number = 0
            while time.monotonic() < until:
                held = _one(client, f"urgent{number}", 0)
                sent[held.request_ids[0]] = time.monotonic()
                held.release()
                held.wait()
                number += 1
            backlog.wait()
    came = probe.seen.pop("came")
    return probe.seen, [1000 * (came[rid] - at) for rid, at in sent.items()]


def measure(quick: bool) -> dict[str, Any]:
    """Run all repeats, interleaved; return the part's figures."""
    repeats, count, seconds = (2, 30, 3.0) if quick else (5, 100, 10.0)
    figures: dict[str, list[float]] = {}

    def keep(name: str, times: list[float]) -> None:
        for share, label in ((0.5, "p50"), (0.99, "p99")):
            figures.setdefault(f"{name}_ms_{label}", []).append(report.percentile(times, share))

    with tempfile.TemporaryDirectory(prefix="warmq-bench-") as name:
        for repeat in range(repeats):
            folder = Path(name) / str(repeat)
            woken, waits = wake(folder / "wake", count)
            keep("wake", woken)
            keep("commit_idle", waits)
            keep("answer", answer(folder / "answer", count))
            for case, slots, step_s in (
                ("64", 64, 0),
                ("256", 256, 0),
                ("256_stepped", 256, STEP_S),
            ):
                seen, overtook = busy(folder / case, slots, seconds, step_s)
                keep(f"overtake_{case}", overtook)
                for label in ("p50", "p99"):
                    wait_ms = seen[f"finish_to_committed_ms_{label}"]
                    figures.setdefault(f"commit_{case}_ms_{label}", []).append(wait_ms)
    return {
        "requests_per_idle_repeat": count,
        "reached": {name: report.spread(values, 2) for name, values in figures.items()},
    }
