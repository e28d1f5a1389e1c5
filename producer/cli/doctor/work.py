"""Checks workers, queues, batches and dead letters.

An announcement is the state that a worker writes to Redis every second.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from contract.batch import Batch
from contract.errors import StoreForbidden
from contract.redis import keys
from contract.redis.announced_models import (
    has_loaded,
    models_of,
    sleep_failed,
    swaps_of,
    unloadable,
)
from contract.redis.announced_servers import shared_servers
from contract.redis.announcements import (
    WAITS_FOR,
    is_alive,
    model_name,
    protocol_of,
    queues_of,
)
from contract.redis.batches import BatchStore
from contract.settings import Settings
from contract.version import PROTOCOL, version
from producer.cli.doctor.finding import Area, Finding, listed, of_stall, ok, problem, remark
from producer.cli.progress import counted, waits_for_run
from producer.model_states import swap_text
from producer.over_http import with_http_batches
from producer.queue_workers import clock_text, served_names, server_text
from producer.stalls import StallReads
from producer.start_command import start_command

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


def check_work(store: BatchStore, settings: Settings, *, restricted: bool) -> Iterator[Finding]:
    """Yield findings about workers, queues and batches; with `restricted`, do not scan keys."""
    announcements = store.announcements()
    alive = [worker for worker in announcements if is_alive(worker)]
    if not alive:
        last = min(announcements, key=lambda worker: float(worker["silent_s"]), default={})
        queue = str(last.get("queue", settings.queue))
        remedy = (
            "start one with the same WARMQ_REDIS_URL: "
            f"`{start_command(queue, settings.queue, announcements)}`; `python -m worker.check` "
            "checks its machine"
        )
        yield problem("workers", "no_worker", "no worker runs on this Redis", remedy)
    for worker in sorted(announcements, key=lambda worker: (str(worker["queue"]), worker["id"])):
        yield from _worker(worker)
    for server in shared_servers(alive):
        yield ok("workers", "shared_server", server_text(server), **server._asdict())
    # A user without the right to read batches gets the findings about the workers first.
    batches = store.batches()
    yield from _queues(store, settings, announcements, batches)
    if not restricted:
        yield from _unread_lists(
            store, {settings.queue, *(queue for w in alive for queue in queues_of(w))}
        )
    yield _open_batches(with_http_batches(store, batches), store.now_ms() / 1000)


def _is_unseen(worker: Worker) -> bool:
    """Return whether a worker that has not announced its end was not seen lately."""
    silent = not is_alive(worker) or bool(worker.get("overdue"))
    return silent and worker.get("state") != "stopped"


def _worker(worker: Worker) -> Iterator[Finding]:
    """Yield the findings about one announcement, which may be of another version of warmq."""
    facts = {
        "id": str(worker["id"]),
        "state": str(worker.get("state", "unknown")),
        "why": worker.get("why"),
        "queue": str(worker["queue"]),
        "model": model_name(worker) or None,
        "version": worker.get("version"),
        "in_flight": worker.get("in_flight", 0),
        "limit": worker.get("limit"),
        "silent_s": round(worker["silent_s"], 1),
    }
    name, state, queue = facts["id"], facts["state"], facts["queue"]
    why = f" ({facts['why']})" if facts["why"] else ""
    if state == "stopped":
        text = f"{name} has failed and stopped{why}, queue {queue}"
        remedy = "correct the cause and start it again; its log has the details"
        yield remark("workers", "worker_stopped", text, remedy, **facts)
        return
    if _is_unseen(worker):
        text = f"{name} last announced itself {clock_text(facts['silent_s'])} ago"
        remedy = "if it was not stopped on purpose, read the end of its log"
        text += f" ({state}, queue {queue})"
        yield remark("workers", "worker_silent", text, remedy, **facts)
        return
    # A worker that has just become ready announces no limit yet.
    limit = f" of {facts['limit']}" if facts["limit"] else ""
    text = f"{name}: {state}{why}, {facts['in_flight']}{limit} in flight, queue {queue}"
    text += f", model {facts['model']}" if facts["model"] else ""
    text += f", warmq {facts['version']}" if facts["version"] else ""
    if state in _STATES:
        code, remedy = _STATES[state]
        if WAITS_FOR in why:
            remedy = "it runs requests when a server answers; start the servers that it names"
        yield remark("workers", code, text, remedy, **facts)
    elif why:
        remedy = "its requests wait meanwhile, and none is lost"
        yield remark("workers", "worker_waits", text, remedy, **facts)
    else:
        yield ok("workers", "worker", text, **facts)
    yield from _models(worker)
    yield from _worker_version(facts, protocol_of(worker))


def _models(worker: Worker) -> Iterator[Finding]:
    """Yield the models and swaps of a worker with several models, and its models' failures."""
    name = str(worker["id"])
    if models := list(models_of(worker)):
        swaps = swaps_of(worker)
        text = f"{name} has the models {listed(models)}"
        text += f"; its last swap: {swap_text(swaps[-1])}" if swaps else ""
        facts = {"id": name, "loaded": model_name(worker) or None, "models": models}
        swap_facts = [swap._asdict() for swap in swaps]
        yield ok("workers", "worker_models", text, **facts, swaps=swap_facts)
    remedy = "its requests wait; correct its entry in WARMQ_MODELS, or free memory"
    for model, one in unloadable(worker).items():
        text = f"{name} could not load {model} (tries: {one.tries}): {one.why}"
        facts = {"id": name, "model": model, **one._asdict()}
        yield remark("workers", "worker_unloadable", text, remedy, **facts)
    remedy = "swaps to it take longer; start the worker again if the cause is gone"
    for model, why in sleep_failed(worker).items():
        text = f"{name} starts a new engine each time it loads {model}, which cannot sleep: {why}"
        yield remark("workers", "worker_sleep_failed", text, remedy, id=name, model=model, why=why)


def _worker_version(facts: dict[str, Any], protocol: int) -> Iterator[Finding]:
    text = f"{facts['id']} has protocol {protocol}, this producer has {PROTOCOL}"
    protocols = {"theirs": protocol, "own": PROTOCOL}
    if protocol < PROTOCOL:
        text += ": it does not take what this producer queues"
        yield problem("workers", "worker_older", text, "upgrade the worker", **facts, **protocols)
    elif protocol > PROTOCOL:
        text += ": this producer may misread it"
        yield problem("workers", "worker_newer", text, "upgrade the producer", **facts, **protocols)
    elif facts["version"] not in (None, version()):
        text = f"{facts['id']} runs warmq {facts['version']}, this producer {version()}"
        remedy = "install the same version everywhere"
        yield remark("workers", "worker_other_version", text, remedy, **facts, own=version())


def _queues(
    store: BatchStore, settings: Settings, announced: Sequence[Worker], batches: Sequence[Batch]
) -> Iterator[Finding]:
    """Yield the states of the queues of this producer, of workers and of unfinished batches."""
    alive = [worker for worker in announced if is_alive(worker)]
    served = sorted({queue for worker in alive for queue in queues_of(worker)})
    unfinished = [batch for batch in batches if not batch.finished]
    of_batches = {queue for batch in unfinished for queue in batch.queues if queue}
    queues = sorted({settings.queue, *served, *of_batches})
    for queue in queues:
        lengths = store.queue_lengths(queue)
        suspects = lengths.pop(keys.suspects_list(queue))
        workers = [worker for worker in alive if queue in queues_of(worker)]
        waiting = sum(lengths.values())
        in_flight = sum(one.get("in_flight", 0) for one in workers if one["queue"] == queue)
        facts: dict[str, Any] = {
            "queue": queue, "waiting": waiting, "in_flight": in_flight, "workers": len(workers),
        }  # fmt: skip
        if workers:
            late = sum(map(_is_unseen, workers))
            unseen = sum(_is_unseen(one) and queue in queues_of(one) for one in announced)
            text = f"{queue}: {waiting} waiting, {in_flight} in flight"
            text += " when last seen" if late else ""
            text += f", workers: {len(workers) - late}"
            text += f", {unseen} not seen lately" if unseen else ""
            if any(map(models_of, workers)):
                facts["loaded"] = sum(has_loaded(worker, queue) for worker in workers)
                text += f" (its model is loaded in {facts['loaded']})"
            yield ok("queue", "queue", text, **facts)
        elif served and not (waiting or suspects):
            models = served_names(alive, settings.queue)
            text = f"no worker serves queue {queue}; workers serve: {listed(models)}"
            remedy = "submit to one of these, or start a worker for it with `warmq-worker`"
            facts |= {"others": served}  # a name of `doctor --json`
            yield remark("queue", "queue_unused", text, remedy, **facts)
        if suspects:
            text = (
                f"queue {queue} has {counted(suspects, 'request')} suspected of killing an engine"
            )
            remedy = (
                "a worker runs each of them alone; one that kills its engine again becomes a dead "
                "letter"
            )
            yield remark("queue", "suspects", text, remedy, queue=queue, count=suspects)
    for stall in StallReads.using(store).stalls(settings, queues, unfinished):
        if not stall.code.startswith("memory_"):  # the check of the server has these
            yield of_stall("queue", stall)


def foreign_keys(store: BatchStore, queue: str) -> Iterator[Finding]:
    """Yield a problem for each key of another program that has a name of the queue's keys."""
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
    done, total = oldest.done, oldest.number("total")
    more = "+" if oldest.may_grow else ""
    waits = f". {text}" if (text := waits_for_run(oldest)) else ""
    age_s = max(0.0, round(now_s - int(oldest.created) / 1000))
    return ok(
        "queue", "open_batch",
        f"unfinished batches: {len(unfinished)}; the oldest is {oldest.id}: {oldest.status}, "
        f"{done}/{total}{more} done, submitted {clock_text(age_s)} ago{waits}",
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
