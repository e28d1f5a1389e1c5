"""How fast a running batch goes, and what it takes of the machine, between two points of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import redis
from bench.common.load import Held, cpu_s, redis_calls

from contract.redis import keys
from demo.stack import eventually

LOOK_S = 0.01
#: The stretch that is measured, as shares of the requests: all workers have begun, none is dry.
BEGIN, END = 0.25, 0.75


@dataclass(frozen=True, slots=True)
class Mark:
    """What had been used by when: Redis time, CPU seconds, requests completed, scripts run."""

    at: float
    completed: int
    redis_s: float
    workers_s: float
    machine: Any
    scripts: int


def mark(client: redis.Redis, batch_id: str, pids: Sequence[int]) -> Mark:
    """Look at everything once."""
    pipe = client.pipeline(transaction=False)
    pipe.time()
    pipe.hget(keys.batch_key(batch_id), "completed")
    pipe.info("cpu")
    (seconds, micros), completed, cpu = pipe.execute()
    # One core is the limit of Redis' main thread alone; it has others for the append-only file.
    redis_s = float(cpu["used_cpu_user_main_thread"]) + float(cpu["used_cpu_sys_main_thread"])
    workers_s = sum(map(cpu_s, pids))
    scripts = redis_calls(client).get("evalsha", 0)
    machine = psutil.cpu_times()
    return Mark(seconds + micros / 1e6, int(completed or 0), redis_s, workers_s, machine, scripts)


def between(begin: Mark, end: Mark) -> dict[str, float]:
    """Return the rate and what a request took, from one mark to another.

    `redis_share` is of one core, `machine_share` of all of them.
    """
    count, seconds = end.completed - begin.completed, end.at - begin.at
    redis_s = end.redis_s - begin.redis_s
    idle = (end.machine.idle + end.machine.iowait) - (begin.machine.idle + begin.machine.iowait)
    return {
        "requests": count,
        "seconds": seconds,
        "per_s": count / seconds,
        "redis_share": redis_s / seconds,
        "redis_us_per_request": 1e6 * redis_s / count,
        "worker_us_per_request": 1e6 * (end.workers_s - begin.workers_s) / count,
        "scripts_per_request": (end.scripts - begin.scripts) / count,
        "machine_share": 1 - idle / (sum(end.machine) - sum(begin.machine)),
    }


def follow(held: Held, pids: Sequence[int], timeout_s: float = 300) -> dict[str, float]:
    """Release a batch; return its figures over the middle half of its requests, as it passes."""
    count, client = len(held.request_ids), held.client
    key = keys.batch_key(held.batch.id)
    held.release()
    marks: list[Mark] = []
    for share in (BEGIN, END):
        goal = int(share * count)
        eventually(
            lambda goal=goal: int(client.hget(key, "completed") or 0) >= goal,
            timeout_s, f"{goal} of {count} requests are through", LOOK_S,
        )  # fmt: skip
        marks.append(mark(client, held.batch.id, pids))
    return between(*marks)
