"""The checks of `producer doctor`, in the order of its output. They change nothing."""

import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from contract.batch import Batch
from contract.errors import StoreForbidden, StoreRefused, StoreUnavailable
from contract.redis import keys
from contract.redis.announcements import is_alive, protocol_of
from contract.redis.batches import BatchStore
from contract.redis.connect import credentials_of, masked
from contract.redis.records import Records
from contract.settings import Settings, SettingsError, load, origins
from contract.version import PROTOCOL, version
from producer.cli.doctor import findings
from producer.cli.doctor.findings import Area, Code, Finding, ok, problem, remark
from producer.redis import missing_permissions, tenant_usage

#: Tenants whose records are reported, the largest first.
_TENANTS = 3
#: Free space: below the first, some thousand results may not fit; below the second, some hundred.
LOW_BYTES = 2**30
FULL_BYTES = 64 * 2**20
#: Dead letters are counted up to this number, because each must be read.
DEAD_COUNTED = 1000
FOREIGN_KEYS, UNREAD_LISTS = "keys of other programs", "lists of requests that no worker reads"
#: Codes for workers that run no requests now, by state.
_STATES: dict[str, Code] = {
    "starting": "worker_starting",
    "degraded": "worker_degraded",
    "draining": "worker_draining",
}
#: How Redis names the command that a user may not run.
_REFUSED = re.compile(r"run the '([^']+)' command")

Worker = dict[str, Any]


def examine(folder: Path | None, *, worker: bool = False) -> Iterator[Finding]:
    """Run all checks. Results would be written to `folder`, None for a deleted one.

    With `worker`, Redis' user must have the rights of a worker too.
    """
    yield ok("settings", "version", version=version(), python=platform.python_version())
    try:
        settings, given = load(Settings), origins(Settings)
    except SettingsError as error:
        yield problem("settings", "settings_wrong", error=error.message)
        yield check_disk(folder)
        return
    url = settings.redis_url.get_secret_value()
    values = {name: getattr(settings, name) for name in given} | {"redis_url": masked(url)}
    lines = [f"WARMQ_{name.upper()}={values[name]} ({given[name]})" for name in sorted(given)]
    yield ok("settings", "settings", given=lines, origins=given)
    yield check_disk(folder)
    try:
        store = BatchStore.open(url, "warmq-producer", ttl_ms=settings.result_ttl_ms)
        yield from _RedisChecks(store, settings, worker).run()
    except StoreForbidden as error:  # already when the connection is opened
        command = _REFUSED.search(error.message)
        missing = [command[1] if command else error.message]
        yield problem("redis", "rights_missing", missing=missing, needed_by=["a producer"])
    except StoreUnavailable as error:
        yield problem("redis", "redis_unusable", url=masked(url), error=error.message)


def check_disk(folder: Path | None) -> Finding:
    """Check that results can be written to a folder; None is a deleted one."""
    free, writable = 0, False
    if folder is not None:
        try:
            free = shutil.disk_usage(folder).free
            writable = os.access(folder, os.W_OK | os.X_OK)
        except OSError:
            writable = False
    shown = "this folder, which was deleted" if folder is None else str(folder)
    facts = {"folder": shown, "free_bytes": free}
    if not writable:
        return remark("disk", "folder_unwritable", **facts)
    if free < FULL_BYTES:
        return problem("disk", "disk_full", **facts)
    return remark("disk", "disk_low", **facts) if free < LOW_BYTES else ok("disk", "disk", **facts)


class _RedisChecks:
    """The checks of one Redis. One that this user may not run becomes a remark."""

    def __init__(self, store: BatchStore, settings: Settings, worker: bool) -> None:
        self._store, self._settings, self._worker = store, settings, worker
        self._url = settings.redis_url.get_secret_value()
        # Redis logs each refusal, so a restricted user does not try to list all keys.
        self._user = credentials_of(self._url)[0]
        self._restricted = self._user not in ("", "default")
        self._primary, self._usable = True, True

    def run(self) -> Iterator[Finding]:
        checks: tuple[tuple[Area, str, Callable[[], Iterable[Finding]]], ...] = (
            ("redis", "INFO (version, append-only file, eviction, memory, disk)", self._server),
            ("redis", "TIME (the clock)", self._clock),
            ("redis", "the rights of this user", self._rights),
            ("queue", "TYPE (keys of other programs)", self._foreign_keys),
            ("workers", "workers, queues and batches", self._work),
            ("redis", "records of gateways", self._records),
            ("queue", "dead letters", lambda: [check_dead_letters(self._store)]),
        )
        for area, what, check in checks:
            try:
                if self._usable:
                    yield from check()
            except StoreForbidden as error:
                yield remark(area, "forbidden", what=what, error=error.message)
            except StoreRefused:  # for example, a key has another type
                found = [*_foreign_keys(self._store, self._settings.queue)]
                if not any(finding.level == "problem" for finding in found):
                    raise
                yield from found
                return

    def _server(self) -> Iterator[Finding]:
        info = self._store.info()
        if findings.server_mode(info) == "sentinel":
            self._usable = False
            yield problem("redis", "sentinel", url=masked(self._url))
            return
        self._primary = info.get("role") == "master"
        yield from findings.check_server(info, masked(self._url), self._settings.high_water)

    def _clock(self) -> Iterator[Finding]:
        before = time.time()
        redis_s = self._store.now_ms() / 1000
        yield findings.clocks(before, redis_s, time.time())

    def _rights(self) -> Iterator[Finding]:
        if not self._primary:  # a replica refuses every write
            return
        missing = missing_permissions(self._store, self._settings.queue, worker=self._worker)
        facts = {"needed_by": ["a producer"] + ["a worker"] * self._worker}
        if missing:
            yield problem("redis", "rights_missing", missing=missing, **facts)
        else:
            yield ok("redis", "rights", **facts)

    def _records(self) -> Iterator[Finding]:
        most = Records.using(self._store).most_bytes()
        for held in islice(tenant_usage(self._store), _TENANTS):
            yield findings.tenant_records(held, most)

    def _foreign_keys(self) -> Iterator[Finding]:
        if self._restricted:
            yield remark("queue", "not_looked", user=self._user, what=[FOREIGN_KEYS, UNREAD_LISTS])
            return
        for finding in _foreign_keys(self._store, self._settings.queue):
            self._usable = finding.level != "problem"
            yield finding

    def _work(self) -> Iterator[Finding]:
        store, own_queue = self._store, self._settings.queue
        announcements, batches = store.announcements(), store.batches()
        alive = [worker for worker in announcements if is_alive(worker)]
        if not alive:
            yield problem("workers", "no_worker")
        for worker in sorted(
            announcements, key=lambda worker: (str(worker["queue"]), worker["id"])
        ):
            yield from check_worker(worker)
        yield from _queues(store, own_queue, alive, batches)
        if not self._restricted:
            yield from _unread_lists(store, {own_queue, *(str(w["queue"]) for w in alive)})
        yield _open_batches(batches, store.now_ms() / 1000)


def check_worker(worker: Worker) -> Iterator[Finding]:
    """Yield the findings about one announcement; other versions announce less, or more."""
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
    if not is_alive(worker):
        code: Code = "worker_stopped" if facts["state"] == "stopped" else "worker_silent"
        yield remark("workers", code, **facts)
        return
    busy = _STATES.get(facts["state"]) or ("worker_waits" if facts["why"] else None)
    yield remark("workers", busy, **facts) if busy else ok("workers", "worker", **facts)
    protocol = protocol_of(worker)
    if protocol != PROTOCOL:
        code = "worker_older" if protocol < PROTOCOL else "worker_newer"
        yield problem("workers", code, **facts, theirs=protocol, own=PROTOCOL)
    elif facts["version"] not in (None, version()):
        yield remark("workers", "worker_other_version", **facts, own=version())


def _queues(
    store: BatchStore, own_queue: str, alive: Sequence[Worker], batches: Sequence[Batch]
) -> Iterator[Finding]:
    """Yield the state of this producer's queue, and of those of workers and open batches."""
    served = {str(worker["queue"]) for worker in alive}
    of_batches = {b.fields["queue"] for b in batches if not b.finished and "queue" in b.fields}
    for queue in sorted({own_queue} | served | of_batches):
        lengths = store.queue_lengths(queue)
        suspects = lengths.pop(keys.suspects_list(queue))
        workers = [worker for worker in alive if worker["queue"] == queue]
        facts = {
            "queue": queue,
            "waiting": sum(lengths.values()),
            "in_flight": sum(worker.get("in_flight", 0) for worker in workers),
            "workers": len(workers),
        }
        # The name of this fact is part of `doctor --json`.
        served_queues = {"others": sorted(served - {queue})}
        if workers:
            yield ok("queue", "queue", **facts)
        elif facts["waiting"] or suspects:
            yield problem("queue", "queue_unserved", **facts, **served_queues)
        elif served:
            yield remark("queue", "queue_unused", **facts, **served_queues)
        if suspects:
            yield remark("queue", "suspects", queue=queue, count=suspects)


def _foreign_keys(store: BatchStore, queue: str) -> Iterator[Finding]:
    """Yield each key of a queue that another program has made."""
    try:
        for key, kind in store.wrong_types(queue).items():
            yield problem("queue", "wrong_type", key=key, kind=kind)
    except StoreForbidden as error:
        yield remark("queue", "forbidden", what=f"{FOREIGN_KEYS} (TYPE)", error=error.message)


def _unread_lists(store: BatchStore, queues: Iterable[str]) -> Iterator[Finding]:
    """Yield each list of requests that no worker reads."""
    try:
        for queue in sorted(queues):
            for unread in store.unread_lists(queue):
                facts = {"key": unread.key, "waiting": unread.waiting, "option": unread.option}
                yield problem("queue", "unread_list", queue=queue, **facts)
    except StoreForbidden as error:
        yield remark("queue", "forbidden", what=f"{UNREAD_LISTS} (SCAN)", error=error.message)


def _open_batches(batches: Sequence[Batch], now_s: float) -> Finding:
    """Return the number of unfinished batches and the oldest; `batches` has the newest first."""
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


def check_dead_letters(store: BatchStore) -> Finding:
    """Count the dead letters, up to DEAD_COUNTED."""
    count = sum(1 for _ in islice(store.dead_letters(), DEAD_COUNTED))
    if not count:
        return ok("queue", "no_dead_letters")
    return remark("queue", "dead_letters", count=count, more=count == DEAD_COUNTED)
