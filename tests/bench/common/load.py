"""Work for the worker: batches that are queued but held back until a measurement begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import redis

from contract import naming
from contract.batch import Batch
from contract.index import IndexChunk
from contract.message import MessageWriter
from contract.openai.body import COMPLETION_URL
from contract.redis import keys
from contract.redis.batches import BatchStore
from demo.stack import eventually

TTL_MS = 3_600_000
CHUNK = 500
#: Messages wait here, out of the worker's sight, until `release` renames the list.
HELD = "bench:held"
#: 0.5 KB, the size facts/celery-redis.md and issue 2 measure with.
PROMPT = "x" * 500


def simulated_body(number: int) -> dict[str, Any]:
    """Return a completion body with a prompt of about 0.5 KB."""
    return {"prompt": f"{number:08d} {PROMPT}", "max_tokens": 64}


@dataclass(frozen=True, slots=True)
class Held:
    """A sealed batch that no worker sees yet."""

    client: redis.Redis
    batch: Batch
    list_key: str
    request_ids: list[str]
    step: int

    def release(self) -> float:
        """Hand everything to the worker at once; return Redis time in seconds."""
        pipe = self.client.pipeline(transaction=True)
        pipe.time()
        pipe.rename(HELD, self.list_key)
        ring = naming.turns_key(naming.DEFAULT_QUEUE, self.step)
        pipe.zadd(f"{ring}\x06{naming.DEFAULT_TENANT}", {self.list_key: 0})
        pipe.zadd(ring, {naming.DEFAULT_TENANT: 0})
        seconds, micros = pipe.execute()[0]
        return float(seconds) + micros / 1e6

    def finished_at(self) -> float | None:
        """Return Redis time in seconds when the last result was committed, ms exact."""
        raw = self.client.hget(keys.batch_key(self.batch.id), "finished_at")
        return int(raw) / 1000 if raw else None

    def wait(self, timeout_s: float = 120) -> float:
        """Wait for the end; return its Redis time in seconds."""
        return eventually(self.finished_at, timeout_s, "the batch ends", 0.05)  # type: ignore[return-value]


def hold(
    client: redis.Redis,
    batch_id: str,
    count: int,
    body_of: Callable[[int], dict[str, Any]] = simulated_body,
    *,
    priority: int = 6,
    url: str = COMPLETION_URL,
) -> Held:
    """Queue `count` requests under a held key, as the producer would, and seal the batch."""
    store = BatchStore(client, ttl_ms=TTL_MS)
    queue = naming.DEFAULT_QUEUE
    list_key = naming.turn_list(queue, priority, naming.DEFAULT_TENANT, batch_id)
    _, batch = store.create(batch_id, "", {"queue": queue, "list": list_key})
    writer = MessageWriter(batch.id, int(batch.created), batch.life, queue, priority)
    end, ids = (0, ""), []
    for start in range(0, count, CHUNK):
        numbers = range(start + 1, min(start + CHUNK, count) + 1)
        messages, entries = [], []
        for number in numbers:
            custom_id = f"r{number}"
            request_id = naming.request_id(batch.id, custom_id)
            body = orjson.dumps(body_of(number))
            messages.append(writer.write(request_id, custom_id, number, url, body))
            entries.append((number, custom_id, False))
            ids.append(request_id)
        chunk = IndexChunk(numbers[-1], f"d{numbers[-1]}", entries)
        answer = store.enqueue(
            batch, HELD, end, chunk, messages, [], high_water=0.9, high_water_requests=10**7
        )
        assert answer.answer == "ok", answer
        end = (chunk.cursor, chunk.digest)
    store.seal(batch, end)
    return Held(client, batch, list_key, ids, priority)


def is_ready(client: redis.Redis) -> bool:
    """Whether a worker of the default queue says that its engine is ready."""
    store = BatchStore(client, ttl_ms=TTL_MS)
    return any(worker["state"] == "ready" for worker in store.workers(naming.DEFAULT_QUEUE))


def wait_ready(client: redis.Redis, timeout_s: float = 180) -> None:
    """Wait until it does."""
    eventually(lambda: is_ready(client), timeout_s, "a worker is ready")


def cpu_s(pid: int) -> float:
    """Return the CPU seconds the living threads of a process have used, by the scheduler's ns."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def redis_cpu_s(client: redis.Redis) -> float:
    """Return the CPU seconds the Redis server has used."""
    info = client.info("cpu")
    return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


def redis_calls(client: redis.Redis) -> dict[str, int]:
    """Return calls by command since the last CONFIG RESETSTAT; those inside scripts count too."""
    return {
        name.removeprefix("cmdstat_"): figures["calls"]
        for name, figures in client.info("commandstats").items()
    }
