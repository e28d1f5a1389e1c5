"""Checks workers, queues, batches and dead letters.

An announcement is the state that a worker writes to Redis every second.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from contract.batch import Batch
from contract.errors import StoreForbidden
from contract.redis import keys
from contract.redis.announcements import is_alive, protocol_of
from contract.redis.batches import BatchStore
from contract.version import PROTOCOL, version
from producer.cli.doctor.finding import Area, Finding, listed, ok, problem, remark
from producer.cli.progress import counted
from producer.queue_workers import clock_text

#: Most dead letters that are counted, because each must be read.
DEAD_COUNTED = 1000
#: Names of two checks, for messages.
FOREIGN_KEYS, UNREAD_LISTS = "keys of other programs", "lists of requests that no worker reads"
#: State of a worker that runs no requests now -> code and remedy of the finding.
_STATES = {
    "starting": ("worker_starting", "it takes requests when it is ready; its log has its progress"),
    "degraded": ("worker_degraded", "its engine died and is being rebuilt; its log has the reason"),
    "draining": ("worker_draining", "it is stopping and takes no more requests"),
}

Worker = dict[str, Any]


def forbidden(area: Area, what: str, error: StoreForbidden) -> Finding:
    """Return the finding for a check that Redis's user may not run."""
    text = f"this user may not read {what}; {error.message}"
    remedy = "give this user the rights that docs/how-to/security.md lists"
    return remark(area, "forbidden", text, remedy, what=what, error=error.message)


def check_work(store: BatchStore, own_queue: str, *, restricted: bool) -> Iterator[Finding]:
    """Yield findings about workers, queues and batches; with `restricted`, do not scan keys."""
    announcements = store.announcements()
    alive = [worker for worker in announcements if is_alive(worker)]
    if not alive:
        remedy = (
            "start one with the same WARMQ_REDIS_URL; `python -m worker.check` checks its machine"
        )
        yield problem("workers", "no_worker", "no worker runs on this Redis", remedy)
    for worker in sorted(announcements, key=lambda worker: (str(worker["queue"]), worker["id"])):
        yield from _worker(worker)
    batches = store.batches()  # a user without the right to read them learns of the workers first
    yield from _queues(store, own_queue, alive, batches)
    if not restricted:
        yield from _unread_lists(store, {own_queue, *(str(w["queue"]) for w in alive)})
    yield _open_batches(batches, store.now_ms() / 1000)


def _worker(worker: Worker) -> Iterator[Finding]:
    """Yield the findings about one announcement, which may be of another version of warmq."""
    facts = {
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
    name, state, queue = facts["id"], facts["state"], facts["queue"]
    why = f" ({facts['why']})" if facts["why"] else ""
    if not is_alive(worker) and state == "stopped":
        text = f"{name} has failed and stopped{why}, queue {queue}"
        remedy = "correct the cause and start it again; its log has the details"
        yield remark("workers", "worker_stopped", text, remedy, **facts)
        return
    if not is_alive(worker):
        text = f"{name} last announced itself {clock_text(facts['silent_s'])} ago"
        remedy = "unless it was stopped on purpose, read the end of its log"
        text += f" ({state}, queue {queue})"
        yield remark("workers", "worker_silent", text, remedy, **facts)
        return
    limit = f" of {facts['limit']}" if facts["limit"] is not None else ""
    text = f"{name}: {state}{why}, {facts['in_flight']}{limit} in flight, queue {queue}"
    text += f", model {facts['model']}" if facts["model"] else ""
    text += f", warmq {facts['version']}" if facts["version"] else ""
    if state in _STATES:
        code, remedy = _STATES[state]
        yield remark("workers", code, text, remedy, **facts)
    elif why:
        remedy = "its requests wait meanwhile, and none is lost"
        yield remark("workers", "worker_waits", text, remedy, **facts)
    else:
        yield ok("workers", "worker", text, **facts)
    yield from _worker_version(facts, protocol_of(worker))


def _worker_version(facts: dict[str, Any], protocol: int) -> Iterator[Finding]:
    text = f"{facts['id']} has protocol {protocol}, this producer has {PROTOCOL}"
    protocols = {"theirs": protocol, "own": PROTOCOL}
    if protocol < PROTOCOL:
        text += ": it does not take what this one queues"
        yield problem("workers", "worker_older", text, "upgrade the worker", **facts, **protocols)
    elif protocol > PROTOCOL:
        text += ": this producer may misread it"
        yield problem("workers", "worker_newer", text, "upgrade the producer", **facts, **protocols)
    elif facts["version"] not in (None, version()):
        text = f"{facts['id']} runs warmq {facts['version']}, this producer {version()}"
        remedy = "install the same version everywhere"
        yield remark("workers", "worker_other_version", text, remedy, **facts, own=version())


def _queues(
    store: BatchStore, own_queue: str, alive: Sequence[Worker], batches: Sequence[Batch]
) -> Iterator[Finding]:
    """Yield the states of the queues of this producer, of workers and of unfinished batches."""
    served = {str(worker["queue"]) for worker in alive}
    of_batches = {b.fields["queue"] for b in batches if not b.finished and "queue" in b.fields}
    for queue in sorted({own_queue} | served | of_batches):
        lengths = store.queue_lengths(queue)
        suspects = lengths.pop(keys.suspects_list(queue))
        workers = [worker for worker in alive if worker["queue"] == queue]
        waiting = sum(lengths.values())
        in_flight = sum(worker.get("in_flight", 0) for worker in workers)
        facts: dict[str, Any] = {
            "queue": queue, "waiting": waiting, "in_flight": in_flight, "workers": len(workers),
        }  # fmt: skip
        if workers:
            text = f"{queue}: {waiting} waiting, {in_flight} in flight, workers: {len(workers)}"
            yield ok("queue", "queue", text, **facts)
        elif waiting or suspects or served:
            yield _unserved(facts, sorted(served), has_requests=bool(waiting or suspects))
        if suspects:
            text = (
                f"queue {queue} has {counted(suspects, 'request')} suspected of killing an engine"
            )
            remedy = "a worker runs each of them alone; one that kills it again is a dead letter"
            yield remark("queue", "suspects", text, remedy, queue=queue, count=suspects)


def _unserved(facts: dict[str, Any], served: list[str], *, has_requests: bool) -> Finding:
    facts |= {"others": served}  # a name of `doctor --json`
    queue, serving = facts["queue"], f"; served are: {listed(served)}" if served else ""
    if not has_requests:
        text = f"no worker serves queue {queue}{serving}"
        remedy = "submit with --model, or start a worker for it"
        return remark("queue", "queue_unused", text, remedy, **facts)
    waiting = counted(facts["waiting"], "request")
    text = f"queue {queue} has {waiting} waiting, and no worker serves it{serving}"
    remedy = (
        "start a worker for it (WARMQ_SERVED_MODEL_NAME), or cancel its batches and submit them "
        "with another --model"
    )
    return problem("queue", "queue_unserved", text, remedy, **facts)


def foreign_keys(store: BatchStore, queue: str) -> Iterator[Finding]:
    """Yield a problem for each key with a queue's name that another program has created."""
    remedy = "remove or rename it, or choose another database (WARMQ_REDIS_URL) or WARMQ_QUEUE"
    try:
        for key, kind in store.wrong_types(queue).items():
            text = f"the key {key!r} is a {kind} of another program, but warmq uses this name"
            yield problem("queue", "wrong_type", text, remedy, key=key, kind=kind)
    except StoreForbidden as error:
        yield forbidden("queue", f"{FOREIGN_KEYS} (TYPE)", error)


def _unread_lists(store: BatchStore, queues: Iterable[str]) -> Iterator[Finding]:
    """Yield a problem for each list of requests that no worker reads."""
    try:
        for queue in sorted(queues):
            for unread in store.unread_lists(queue):
                facts = {"key": unread.key, "waiting": unread.waiting, "option": unread.option}
                text = (
                    f"{counted(unread.waiting, 'request')} for queue {queue} in the list "
                    f"{unread.key!r}, which no worker reads: a Celery client sets {unread.option}"
                )
                remedy = (
                    f"remove {unread.option} from its broker_transport_options and send again "
                    "(docs/how-to/python.md)"
                )
                yield problem("queue", "unread_list", text, remedy, queue=queue, **facts)
    except StoreForbidden as error:
        yield forbidden("queue", f"{UNREAD_LISTS} (SCAN)", error)


def _open_batches(batches: Sequence[Batch], now_s: float) -> Finding:
    """Return the finding about unfinished batches; `batches` has the newest first."""
    unfinished = [batch for batch in batches if not batch.finished]
    if not unfinished:
        text = f"no unfinished batch ({len(batches)} in all)"
        return ok("queue", "no_open_batch", text, batches=len(batches))
    oldest = unfinished[-1]
    done, total = oldest.terminal, oldest.number("total")
    age_s = max(0.0, round(now_s - int(oldest.created) / 1000))
    return ok(
        "queue", "open_batch",
        f"unfinished batches: {len(unfinished)}; the oldest is {oldest.id}: {oldest.status}, "
        f"{done}/{total} done, submitted {clock_text(age_s)} ago",
        unfinished=len(unfinished), id=oldest.id, status=oldest.status, done=done, total=total,
        age_s=age_s,
    )  # fmt: skip


def check_dead_letters(store: BatchStore) -> Finding:
    """Count the dead letters, up to DEAD_COUNTED."""
    count = sum(1 for _ in islice(store.dead_letters(), DEAD_COUNTED))
    if not count:
        return ok("queue", "no_dead_letters", "no dead letters")
    more = count == DEAD_COUNTED
    text = counted(count, "dead letter") + (" or more" if more else "")
    remedy = "`producer dead list` has their reasons; retry or delete them"
    return remark("queue", "dead_letters", text, remedy, count=count, more=more)
