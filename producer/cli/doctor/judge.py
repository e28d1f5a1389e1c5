"""Judges a Redis server by what it tells of itself, and its clock; and by what it has of workers,
queues, batches and dead letters."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from contract.batch import Batch
from contract.errors import StoreForbidden
from contract.redis import keys
from contract.redis.announcements import is_alive, protocol_of
from contract.redis.batches import BatchStore
from contract.version import PROTOCOL
from producer.redis import TenantUsage

#: A problem stops the work, or will; a remark does not.
Level = Literal["ok", "remark", "problem"]
Area = Literal["redis", "workers", "queue", "disk", "settings"]
#: The same words for ever: scripts look at them.
Code = Literal[
    "aof_off", "aof_on", "clock", "clock_differs", "cluster", "dead_letters", "disk", "disk_full",
    "disk_low", "evicts", "evicts_nothing", "folder_unwritable", "forbidden", "memory",
    "memory_full", "memory_high", "memory_unlimited", "no_dead_letters", "no_open_batch",
    "no_worker", "not_looked", "open_batch", "other_policy", "queue", "queue_unserved",
    "queue_unused", "records", "records_high", "redis_unusable", "redis_writes_fail", "replica",
    "rights", "rights_missing", "sentinel", "server", "server_too_old", "settings",
    "settings_wrong", "suspects", "unread_list", "version", "worker", "worker_degraded",
    "worker_draining", "worker_newer", "worker_older", "worker_other_version", "worker_silent",
    "worker_starting", "worker_stopped", "worker_waits", "wrong_type",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding. `facts` are what its words are made of: text, numbers, lists of text.

    Names that end in `_bytes` and `_s` are bytes and seconds.
    """

    area: Area
    code: Code
    level: Level
    facts: dict[str, Any]


def ok(area: Area, code: Code, **facts: Any) -> Finding:
    """Return that something is as it should be."""
    return Finding(area, code, "ok", facts)


def remark(area: Area, code: Code, **facts: Any) -> Finding:
    """Return what somebody may want to change, though the work goes on."""
    return Finding(area, code, "remark", facts)


def problem(area: Area, code: Code, **facts: Any) -> Finding:
    """Return what stops the work, or will."""
    return Finding(area, code, "problem", facts)


#: The oldest server whose commands warmq's scripts know.
OLDEST = (6, 2)
#: From which difference on clocks are told of, in seconds.
CLOCK_S = 5.0
#: From which part of what a tenant may keep in Redis on it is told as high.
RECORDS_HIGH = 0.8
#: What INFO tells of the last write to disk, and to which file it was.
_LAST_WRITES = {
    "aof_last_write_status": "append-only file",
    "aof_last_bgrewrite_status": "append-only file (its rewrite)",
    "rdb_last_bgsave_status": "snapshot",
}


def judge_server(info: Mapping[str, Any], url: str, high_water: float) -> Iterator[Finding]:
    """Yield what INFO tells: version, mode, role, persistence, memory."""
    yield server_version(info, url)
    if mode(info) == "cluster":
        yield problem("redis", "cluster")
    if info.get("role") in ("slave", "replica"):
        primary = f"{info.get('master_host')}:{info.get('master_port')}"
        yield problem("redis", "replica", primary=primary)
    if info.get("aof_enabled"):
        yield ok("redis", "aof_on")
    else:
        yield remark("redis", "aof_off")
    yield eviction(info)
    yield memory(info, high_water)


def mode(info: Mapping[str, Any]) -> str:
    """Return standalone, cluster or sentinel; Valkey has its own name for the field."""
    return str(info.get("redis_mode") or info.get("server_mode") or "standalone")


def server_version(info: Mapping[str, Any], url: str) -> Finding:
    """Say whether the server is new enough; Valkey tells a Redis' version besides its own."""
    number = str(info.get("redis_version", "0"))
    name, shown = "Redis", number
    if "valkey_version" in info:
        name, shown = "Valkey", str(info["valkey_version"])
    parts = tuple(int(part) for part in re.findall(r"\d+", number)[:2])
    facts = {"name": name, "version": shown, "url": url}
    if parts < OLDEST:
        return problem("redis", "server_too_old", **facts)
    return ok("redis", "server", **facts)


def eviction(info: Mapping[str, Any]) -> Finding:
    """Say whether Redis may drop what it holds."""
    policy, limit = str(info.get("maxmemory_policy", "unknown")), int(info.get("maxmemory", 0))
    if policy == "noeviction":
        return ok("redis", "evicts_nothing")
    if limit:
        return problem("redis", "evicts", policy=policy)
    return remark("redis", "other_policy", policy=policy)


def memory(info: Mapping[str, Any], high_water: float) -> Finding:
    """Say how full Redis is; `high_water` is the share of maxmemory above which submit waits."""
    used, limit = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    if not limit:
        return remark("redis", "memory_unlimited", used_bytes=used)
    facts = {"used_bytes": used, "limit_bytes": limit, "percent": round(100 * used / limit)}
    if used >= limit:
        return problem("redis", "memory_full", **facts)
    if used >= limit * high_water:
        return remark("redis", "memory_high", **facts)
    return ok("redis", "memory", **facts)


def records(held: TenantUsage, most: int) -> Finding:
    """Say what a tenant of a gateway keeps in Redis; `most` is where gateways refuse more."""
    facts = {
        "tenant": held.tenant,
        "held_bytes": held.bytes,
        "most_bytes": most,
        "kinds": [f"{count} {kind}" for kind, count in held.kinds.items()],
        "sampled": held.sampled,
    }
    if held.bytes >= most * RECORDS_HIGH:
        return remark("redis", "records_high", **facts)
    return ok("redis", "records", **facts)


def last_writes(info: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield each file that Redis could not write to the last time it tried."""
    for field, what in _LAST_WRITES.items():
        if info.get(field, "ok") != "ok":
            yield problem("disk", "redis_writes_fail", what=what)


def clocks(before_s: float, redis_s: float, after_s: float) -> Finding:
    """Compare the clocks: this machine's just before and after Redis was asked for its own."""
    ahead_s = redis_s - (before_s + after_s) / 2
    unknown_s = abs(after_s - before_s) / 2  # where between the two Redis looked at its clock
    if abs(ahead_s) - unknown_s <= CLOCK_S:
        return ok("redis", "clock", within_s=CLOCK_S)
    direction = "ahead of" if ahead_s > 0 else "behind"
    return remark("redis", "clock_differs", apart_s=abs(ahead_s), direction=direction)


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
