"""Judges workers, queues, batches and dead letters by what Redis has of them."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from contract.batch import Batch
from contract.errors import StoreForbidden
from contract.redis import keys
from contract.redis.announcements import is_alive, protocol_of
from contract.redis.batches import BatchStore
from contract.version import PROTOCOL
from producer.cli.doctor.finding import Code, Finding, ok, problem, remark

#: Dead letters are counted up to here: each must be read.
DEAD_COUNTED = 1000
#: What is looked for among all keys of a Redis.
STRANGERS, UNREAD = "keys of other programs", "lists of requests that no worker reads"
#: What is told of a worker that does not run requests now.
_STATES: dict[str, Code] = {
    "starting": "worker_starting",
    "degraded": "worker_degraded",
    "draining": "worker_draining",
}

Worker = dict[str, Any]


def judge_workers(heard: Sequence[Worker], version: str) -> Iterator[Finding]:
    """Yield a finding for each worker that has announced itself; `version` is the producer's."""
    if not living(heard):
        yield problem("workers", "no_worker")
    for worker in sorted(heard, key=lambda worker: (str(worker["queue"]), worker["id"])):
        facts = _facts(worker)
        if not is_alive(worker):
            code: Code = "worker_stopped" if facts["state"] == "stopped" else "worker_silent"
            yield remark("workers", code, **facts)
            continue
        busy = _STATES.get(facts["state"]) or ("worker_waits" if facts["why"] else None)
        yield remark("workers", busy, **facts) if busy else ok("workers", "worker", **facts)
        if protocol_of(worker) != PROTOCOL:
            both = {"theirs": protocol_of(worker), "own": PROTOCOL}
            code = "worker_older" if both["theirs"] < PROTOCOL else "worker_newer"
            yield problem("workers", code, **facts, **both)
        elif facts["version"] not in (None, version):
            yield remark("workers", "worker_other_version", **facts, own=version)


def _facts(worker: Worker) -> dict[str, Any]:
    """Return what is told of a worker; workers of other versions announce less, or more."""
    return {
        "id": str(worker["id"]),
        "state": str(worker.get("state", "unknown")),
        "why": worker.get("why"),
        "queue": str(worker["queue"]),
        "model": worker.get("model"),
        "version": worker.get("version"),
        "in_flight": worker.get("in_flight", 0),
        "limit": worker.get("limit"),
        "silent_s": round(worker["silent_s"], 1),
    }


def living(heard: Sequence[Worker]) -> list[Worker]:
    """Return the announcements of those who live."""
    return [worker for worker in heard if is_alive(worker)]


def judge_queues(
    store: BatchStore, own: str, heard: Sequence[Worker], batches: Sequence[Batch]
) -> Iterator[Finding]:
    """Yield the state of each queue: this producer's own, those of workers and of open batches."""
    alive = living(heard)
    served = {str(worker["queue"]) for worker in alive}
    open_batches = {b.fields["queue"] for b in batches if not b.finished and "queue" in b.fields}
    for queue in sorted({own} | served | open_batches):
        lengths = store.queue_lengths(queue)
        suspects = lengths.pop(keys.suspects_list(queue))
        of_queue = [worker for worker in alive if worker["queue"] == queue]
        facts = {
            "queue": queue,
            "waiting": sum(lengths.values()),
            "in_flight": sum(worker.get("in_flight", 0) for worker in of_queue),
            "workers": len(of_queue),
        }
        others = sorted(served - {queue})
        if of_queue:
            yield ok("queue", "queue", **facts)
        elif facts["waiting"] or suspects:
            yield problem("queue", "queue_unserved", **facts, others=others)
        elif others:
            yield remark("queue", "queue_unused", **facts, others=others)
        if suspects:
            yield remark("queue", "suspects", queue=queue, count=suspects)


def judge_strangers(store: BatchStore, queue: str) -> Iterator[Finding]:
    """Yield each key of a queue that another program has made."""
    try:
        for key, kind in store.wrong_types(queue).items():
            yield problem("queue", "wrong_type", key=key, kind=kind)
    except StoreForbidden as error:
        yield remark("queue", "forbidden", what=f"{STRANGERS} (TYPE)", error=error.message)


def judge_lists(store: BatchStore, queues: Iterable[str]) -> Iterator[Finding]:
    """Yield each list of requests that no worker reads."""
    try:
        for queue in queues:
            for one in store.unread_lists(queue):
                facts = {"key": one.key, "waiting": one.waiting, "option": one.option}
                yield problem("queue", "unread_list", queue=queue, **facts)
    except StoreForbidden as error:
        yield remark("queue", "forbidden", what=f"{UNREAD} (SCAN)", error=error.message)


def judge_batches(batches: Sequence[Batch], now_s: float) -> Finding:
    """Say which unfinished batch is the oldest; `batches` are all, the newest first."""
    unfinished = [batch for batch in batches if not batch.finished]
    if not unfinished:
        return ok("queue", "no_open_batch", batches=len(batches))
    oldest = unfinished[-1]
    return ok(
        "queue",
        "open_batch",
        unfinished=len(unfinished),
        id=oldest.id,
        status=oldest.status,
        done=oldest.terminal,
        total=oldest.number("total"),
        age_s=max(0.0, round(now_s - int(oldest.created) / 1000)),
    )


def judge_letters(store: BatchStore) -> Finding:
    """Say how many dead letters there are, up to DEAD_COUNTED."""
    count = sum(1 for _ in islice(store.dead_letters(), DEAD_COUNTED))
    if not count:
        return ok("queue", "no_dead_letters")
    return remark("queue", "dead_letters", count=count, more=count == DEAD_COUNTED)
