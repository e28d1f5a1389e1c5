"""What waits in the queues, who serves them, and whether there is room for more."""

from __future__ import annotations

from typing import Any

import orjson

from contract.redis import keys
from contract.redis.connect import translated
from contract.redis.scripts import ScriptClient

#: Workers announce themselves every second; one silent for so long is not counted.
WORKER_SILENT_S = 15.0


class Queues(ScriptClient):
    """The queues of one Redis. Raises StoreUnavailable where it cannot be used."""

    def queue_lengths(self, queue: str) -> dict[str, int]:
        """Return how many messages wait in each list of a queue, suspects included."""
        lists = [*keys.priority_lists(queue), keys.suspects_list(queue)]
        with translated():
            return {key: self.redis.llen(key) for key in lists}

    def workers(self, queue: str) -> list[dict[str, Any]]:
        """Return what the living workers of a queue say about themselves."""
        return [w for w in self.announcements(queue) if w.pop("silent_s") < WORKER_SILENT_S]

    def announcements(self, queue: str) -> list[dict[str, Any]]:
        """Return what workers of a queue last said of themselves, `silent_s` ago; also dead ones.

        An announcement is kept for a minute, or for as long as no worker lives.
        """
        with translated():
            raw = self.redis.hgetall(keys.WORKERS)
            now_s, _ = self.redis.time()
        found = []
        for name, record in raw.items():
            at_ms, _, state = record.partition(b"\0")
            silent_s = abs(now_s - int(at_ms) / 1000)  # the clock may have stepped back
            found.append({"id": name.decode(), "silent_s": silent_s} | orjson.loads(state))
        return [worker for worker in found if worker["queue"] == queue]

    def why_full(
        self, list_key: str, coming: int, *, high_water: float, high_water_requests: int
    ) -> str:
        """Say why ENQUEUE would refuse a chunk after `coming` more bytes, '' if it would not."""
        with translated():
            memory = self.redis.info("memory")
            used, limit = memory["used_memory"], memory["maxmemory"]
            if limit:
                full = used + coming > limit * high_water
                return f"Redis uses {used} of {limit} bytes" if full else ""
            waiting = self.redis.llen(list_key)
        return f"{waiting} requests wait in the queue" if waiting >= high_water_requests else ""
