"""Memory of some processes and of Redis, by how many requests are through."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import psutil
import redis
from bench.common.load import redis_cpu_s

LOOK_S = 0.05
#: Points of one that are kept.
POINTS = 200


class Footprint:
    """Samples of one phase: MB of each process and of Redis' data, by requests done."""

    def __init__(self, client: redis.Redis, done: Callable[[], int]) -> None:
        self.done: list[int] = []
        self.mb: dict[str, list[float]] = {}
        self._client = client
        self._count = done
        self._next_at = 0.0
        self._began = (time.monotonic(), redis_cpu_s(client))

    def look(self, **pids: int) -> int:
        """Take one sample unless the last is fresh; return how many requests were done then."""
        now = time.monotonic()
        if now >= self._next_at:
            self._next_at = now + LOOK_S
            self._take(pids)
        return self.done[-1] if self.done else 0

    def _take(self, pids: dict[str, int]) -> None:
        try:
            found = {name: psutil.Process(pid).memory_info().rss for name, pid in pids.items()}
        except psutil.NoSuchProcess:
            return
        if not all(found.values()):  # one has just ended
            return
        found["redis"] = int(self._client.info("memory")["used_memory"])
        self.done.append(self._count())
        for name, size in found.items():
            self.mb.setdefault(name, []).append(round(size / 2**20, 2))

    def spent(self) -> dict[str, float]:
        """Return seconds and Redis CPU seconds since it began."""
        began, redis_s = self._began
        return {
            "seconds": time.monotonic() - began, "redis_s": redis_cpu_s(self._client) - redis_s,
        }  # fmt: skip

    def columns(self) -> dict[str, list[float]]:
        """Return no more than POINTS samples, evenly taken, and the last one."""
        step = max(1, len(self.done) // POINTS)
        kept = [*range(0, len(self.done) - 1, step), len(self.done) - 1]
        table: dict[str, Sequence[float]] = {"done": self.done} | self.mb
        return {name: [column[at] for at in kept] for name, column in table.items()}

    def slope(self, name: str, after: int) -> float:
        """Return MB for each 100,000 requests done, by least squares over what comes `after`."""
        done, mb = self.later(name, after)
        return 100_000 * statistics.linear_regression(done, mb).slope

    def later(self, name: str, after: int) -> tuple[list[int], list[float]]:
        """Return the samples with at least `after` requests done."""
        pairs = [pair for pair in zip(self.done, self.mb[name], strict=True) if pair[0] >= after]
        return [done for done, _ in pairs], [mb for _, mb in pairs]
