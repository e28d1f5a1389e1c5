"""Describes the workers of a queue: their states, versions and protocols.

A worker writes its state to Redis every second: its announcement.
"""

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from contract.batch import Batch
from contract.errors import ProtocolMismatch
from contract.naming import did_you_mean, queue_name
from contract.redis.announced_models import adapters_of, can_load, failure_of
from contract.redis.announced_servers import SharedServer
from contract.redis.announcements import is_alive, model_name, protocol_of, queues_of
from contract.redis.batches import BatchStore
from contract.version import PROTOCOL

#: Most characters shown of the reason why a worker runs nothing; workers have the same limit.
_WHY_CHARACTERS = 300
#: The beginning of a clause about living workers.
_LABEL = "workers: "


class QueueWorkers:
    """Reads the workers of one queue, and remembers the one that was seen last.

    Redis removes a dead worker's announcement after a minute if another worker is alive. With
    `starting`, this process has started a worker, which may not have announced itself yet.
    """

    def __init__(self, store: BatchStore, queue: str, *, starting: bool = False) -> None:
        self._store = store
        self._queue = queue
        self._starting = starting
        self._last: dict[str, Any] | None = None
        self._last_at = 0.0

    def text(self) -> str:
        """Return a clause with the states of the workers, or of the one that was seen last."""
        return self.state()[0]

    def state(self) -> tuple[str, bool]:
        """Return the clause of `text`, and whether there are workers and all are well."""
        announced = self._store.announcements(self._queue)
        alive = [worker for worker in announced if is_alive(worker)]
        for worker in announced:
            at = time.monotonic() - worker["silent_s"]
            if self._last is None or at > self._last_at:
                self._last, self._last_at = worker, at
        if alive:
            states = ", ".join(_state_text(worker, self._queue) for worker in alive)
            return f"{_LABEL}{states}", all(_is_well(worker, self._queue) for worker in alive)
        if self._last is None:
            starts = "the worker starts" if self._starting else ""
            return starts or f"no worker serves queue {self._queue}", False
        silent, last = clock_text(time.monotonic() - self._last_at), self._last
        return (
            f"no worker serves queue {self._queue} any more: the last one, "
            f"{worker_name(last)}, was seen {silent} ago ({': '.join(_state_and_reason(last))}); "
            "see its log"
        ), False


class BatchWorkers:
    """Reads the workers of a batch's queues; `starting` is as in QueueWorkers."""

    def __init__(self, store: BatchStore, *, starting: bool = False) -> None:
        self._store, self._starting = store, starting
        self._by_queue: dict[str, QueueWorkers] = {}

    def text(self, batch: Batch) -> str:
        """Return a clause with the states of the workers of each of the batch's queues."""
        return "; ".join(self._states(batch))

    def row_text(self, batch: Batch) -> str:
        """Return the same for a row whose name is `workers`."""
        return "; ".join(clause.removeprefix(_LABEL) for clause in self._states(batch))

    def state(self, batch: Batch) -> tuple[str, bool]:
        """Return the clause of `text`, and whether each queue has workers and all are well."""
        states = self._states(batch)
        return "; ".join(states), all(states.values())

    def _states(self, batch: Batch) -> dict[str, bool]:
        """Return the clauses of the batch's queues, and whether the workers of each are well."""
        for queue in batch.queues:
            new = QueueWorkers(self._store, queue, starting=self._starting)
            self._by_queue.setdefault(queue, new)
        return dict(self._by_queue[queue].state() for queue in batch.queues)


def _is_well(worker: dict[str, Any], queue: str) -> bool:
    """Return whether a living worker runs requests, and nothing is wrong with it."""
    state = worker.get("state")
    works = state == "swapping" or (state == "ready" and not worker.get("why"))
    return works and not (worker.get("overdue") or failure_of(worker, queue))


def _state_text(worker: dict[str, Any], queue: str) -> str:
    """Return a worker's state, with notes on its reason, its models and a late announcement."""
    state, *notes = _state_and_reason(worker)
    if why := failure_of(worker, queue):
        notes.append(f"cannot load the model: {_one_line(why)}")
    elif can_load(worker, queue) and not notes:
        notes.append(f"with model {model_name(worker)} loaded")
    if worker.get("overdue"):
        state = "silent"
        notes.append(f"{worker_name(worker)} was last seen {clock_text(worker['silent_s'])} ago")
    return f"{state} ({'; '.join(notes)})" if notes else state


def _state_and_reason(worker: dict[str, Any]) -> list[str]:
    """Return a worker's state and, if it runs nothing, the reason."""
    why = _one_line(str(worker.get("why", "")))
    return [str(worker.get("state", "unknown")), *([why] if why else [])]


def _one_line(why: str) -> str:
    """Return a reason without control characters, cut to _WHY_CHARACTERS."""
    return "".join(c if c.isprintable() else " " for c in why)[:_WHY_CHARACTERS]


def worker_name(worker: Mapping[str, Any]) -> str:
    """Return a worker's name in Celery and its process id, both from its id."""
    name, _, process = str(worker["id"]).rpartition(".")[0].rpartition(".")
    return f"{name} (process {process})" if name else str(worker["id"])


def server_text(server: SharedServer) -> str:
    """Return how much of a server the workers use, why no more, and what people feel there."""
    ours = f"{server.in_flight:,}"
    if server.in_server is not None:
        ours += f" of {server.in_server:,}"
    parts = [
        f"{ours} requests are the workers', at most {server.limit:,} ({_one_line(server.why)})"
    ]
    for name, felt_ms, target_ms in (
        ("first token", server.ttft_ms, server.ttft_ms_target),
        ("between tokens", server.itl_ms, server.itl_ms_target),
    ):
        if felt_ms is not None:
            target = "" if target_ms is None else f" (target {target_ms:g} ms)"
            parts.append(f"{name} {felt_ms:g} ms{target}")
    parts.append(f"{server.tokens_today:,} tokens written today")
    return f"{server.server}: {', '.join(parts)}"


def clock_text(seconds: float) -> str:
    """Return a duration as h:mm:ss."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole % 3600 // 60:02}:{whole % 60:02}"


def left_text(seconds: float) -> str:
    """Return a time left as h:mm:ss, at least a second: something is still left."""
    return clock_text(max(1.0, seconds))


def served_names(alive: Iterable[Mapping[str, Any]], base: str, option: str = "") -> list[str]:
    """Return the models that living workers serve, as `--model` takes them, sorted.

    `base` is the default queue, whose requests need no `--model`. `option` goes before the names
    that `--model` takes. Queues of another WARMQ_QUEUE are named only if nothing else is served.
    """
    names, foreign = set(), set()
    for worker in alive:
        for queue in queues_of(worker):
            if queue.startswith(f"{base}."):
                names.add(option + queue.removeprefix(f"{base}."))
            elif queue != base:
                foreign.add(f"queue {queue} (of another WARMQ_QUEUE)")
            elif name := model_name(worker):
                names.add(f"{name} (leave out --model)")
            else:
                names.add("requests without --model")
    return sorted(names or foreign)


def unserved_text(store: BatchStore, base: str, model: str) -> str:
    """Return a text with the served models if `model` is not one of them, otherwise ''.

    `base` is the default queue, which has the requests without a model ('').
    """
    queue = queue_name(model or None, base)
    alive = [one for one in store.announcements() if is_alive(one)]
    if not alive or any(queue in queues_of(one) for one in alive):
        return ""
    if its_queue := _queue_of_adapter(alive, model):
        name = its_queue.removeprefix(f"{base}.")
        return (
            f"no worker serves queue {queue}; {model} is an adapter: submit "
            f"{'without --model' if its_queue == base else f'with --model {name}'} lines that have "
            f'"model": "{model}"'
        )
    ours = {name for one in alive for name in queues_of(one) if name.startswith(f"{base}.")}
    similar = did_you_mean(model, [name.removeprefix(f"{base}.") for name in ours])
    names = served_names(alive, base, "--model ")
    return f"no worker serves queue {queue}; workers serve: {', '.join(names)}{similar}"


def _queue_of_adapter(alive: Iterable[Mapping[str, Any]], name: str) -> str:
    """Return the queue of a worker that has an adapter of this name, or ''."""
    for worker in alive:
        adapters = worker.get("adapters")
        if isinstance(adapters, list) and name in adapters:
            return str(worker["queue"])
        if queue := dict(adapters_of(worker)).get(name):
            return queue
    return ""


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
    """Return the announcements whose protocol is older than this producer's."""
    return [worker for worker in workers if protocol_of(worker) < PROTOCOL]


def describe_workers(workers: list[dict[str, Any]]) -> str:
    """Return a text with the workers' names, versions and protocols."""
    return ", ".join(
        f"{worker['id']} ({_version_of(worker)}, protocol {protocol_of(worker)})"
        for worker in workers
    )


def count_versions(workers: list[dict[str, Any]]) -> str:
    """Return a text with the number of workers of each version."""
    counts = Counter(f"{_version_of(each)} (protocol {protocol_of(each)})" for each in workers)
    return ", ".join(f"{count} of {version}" for version, count in sorted(counts.items()))


def _version_of(worker: dict[str, Any]) -> str:
    return f"warmq {worker.get('version', 'of an unknown version')}"
