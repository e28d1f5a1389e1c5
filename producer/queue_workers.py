"""Describes the workers of a queue: their states, versions and protocols.

A worker writes its state to Redis every second: its announcement.
"""

import time
from collections import Counter
from typing import Any

from contract.errors import ProtocolMismatch
from contract.redis.announcements import is_alive, protocol_of
from contract.redis.batches import BatchStore
from contract.version import PROTOCOL

#: Seconds since its last announcement from which a worker's name is shown.
_NOTABLE_S = 5.0
#: Most characters shown of the reason why a worker runs nothing; workers have the same limit.
_WHY_CHARACTERS = 300


class QueueWorkers:
    """Reads the workers of one queue, and remembers the one that was seen last.

    Redis removes a dead worker's announcement after a minute if another worker is alive.
    """

    def __init__(self, store: BatchStore, queue: str) -> None:
        self._store = store
        self._queue = queue
        self._last: dict[str, Any] | None = None
        self._last_at = 0.0

    def text(self) -> str:
        """Return a clause with the states of the workers, or of the one that was seen last."""
        announced = self._store.announcements(self._queue)
        alive = [worker for worker in announced if is_alive(worker)]
        for worker in announced:
            at = time.monotonic() - worker["silent_s"]
            if self._last is None or at > self._last_at:
                self._last, self._last_at = worker, at
        if alive:
            return f"workers: {', '.join(map(_state, alive))}"
        if self._last is None:
            return f"no worker serves queue {self._queue}"
        silent = clock_text(time.monotonic() - self._last_at)
        return (
            f"no worker serves queue {self._queue} any more: the last one, {_name(self._last)}, "
            f"was seen {silent} ago ({': '.join(_doing(self._last))}); see its log"
        )


def _state(worker: dict[str, Any]) -> str:
    state, *notes = _doing(worker)
    if worker["silent_s"] >= _NOTABLE_S:
        notes.append(f"{_name(worker)} was last seen {clock_text(worker['silent_s'])} ago")
    return f"{state} ({'; '.join(notes)})" if notes else state


def _doing(worker: dict[str, Any]) -> list[str]:
    """Return a worker's state and, if it runs nothing, the reason."""
    why = "".join(c if c.isprintable() else " " for c in str(worker.get("why", "")))
    return [str(worker.get("state", "unknown")), *([why[:_WHY_CHARACTERS]] if why else [])]


def _name(worker: dict[str, Any]) -> str:
    """Return a worker's name in Celery and its process, both from its id."""
    name, _, rest = str(worker["id"]).rpartition(".")[0].rpartition(".")
    return f"{name} (process {rest})" if name else str(worker["id"])


def clock_text(seconds: float) -> str:
    """Return a duration as h:mm:ss."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole % 3600 // 60:02}:{whole % 60:02}"


def refuse_older_workers(store: BatchStore, queue: str) -> None:
    """Raise ProtocolMismatch if a living worker of the queue has an older protocol.

    Such a worker would not find the queued requests, or not end them (contract/version.py).
    """
    if older := older_workers(store.workers(queue)):
        raise ProtocolMismatch(
            f"nothing was queued: workers of queue {queue} are older than this producer (protocol "
            f"{PROTOCOL}) and would not take what it queues: {describe_workers(older)}; "
            "upgrade the workers, or submit with the version that they run"
        )


def older_workers(workers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the announcements with an older protocol than this producer's."""
    return [worker for worker in workers if protocol_of(worker) < PROTOCOL]


def describe_workers(workers: list[dict[str, Any]]) -> str:
    """Return a text with the workers' names, versions and protocols."""
    return ", ".join(
        f"{worker['id']} ({_version_of(worker)}, protocol {protocol_of(worker)})"
        for worker in workers
    )


def count_versions(workers: list[dict[str, Any]]) -> str:
    """Return a text with the number of workers of each version."""
    found = Counter(f"{_version_of(each)} (protocol {protocol_of(each)})" for each in workers)
    return ", ".join(f"{count} of {version}" for version, count in sorted(found.items()))


def _version_of(worker: dict[str, Any]) -> str:
    return f"warmq {worker.get('version', 'of an unknown version')}"
