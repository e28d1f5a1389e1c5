"""The memory of a worker over many requests: sampled from outside, by requests completed."""

from __future__ import annotations

import time

import psutil

from contract.redis.batches import BatchStore
from demo.stack import Worker

Sample = tuple[int, float]


class Watched:
    """A worker whose memory is sampled while it drains the batches in `store`."""

    def __init__(self, worker: Worker, store: BatchStore) -> None:
        assert worker.process is not None
        self._process = psutil.Process(worker.process.pid)
        self._store = store

    def completed(self) -> int:
        """Return how many requests all batches have completed."""
        return sum(batch.number("completed") for batch in self._store.batches())

    def until(self, count: int, *, every: int, timeout_s: float) -> list[Sample]:
        """Return (requests completed, memory in MB), about one for each `every` requests."""
        samples: list[Sample] = []
        deadline = time.monotonic() + timeout_s
        done = 0
        while done < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{done} of {count} requests in {timeout_s} s")
            done = self.completed()
            if not samples or done >= samples[-1][0] + every or done == count:
                samples.append((done, round(self._process.memory_info().rss / 2**20, 2)))
            time.sleep(0.02)
        return samples


def growth(samples: list[Sample], after: int) -> float:
    """Return by what share the memory grew from the first sample at or above `after` requests."""
    later = [mb for done, mb in samples if done >= after]
    return max(later) / later[0] - 1
