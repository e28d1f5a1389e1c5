"""Looks at all there is to look at, one thing after the other; nothing is changed.

This machine's side, settings and the folder of results, is judged here.
"""

import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

from contract.errors import StoreForbidden, StoreRefused, StoreUnavailable
from contract.redis.batches import BatchStore
from contract.redis.connect import credentials_of, masked
from contract.redis.records import Records
from contract.settings import Settings, SettingsError, load, origins
from contract.version import version
from producer.cli.doctor import judge
from producer.cli.doctor.judge import Area, Finding, ok, problem, remark
from producer.redis import missing_permissions, tenant_usage

#: Tenants whose records are told of, the largest first.
_TENANTS = 3
#: How Redis names the command that a user may not run.
_REFUSED = re.compile(r"run the '([^']+)' command")


def examine(folder: Path | None, *, worker: bool = False) -> Iterator[Finding]:
    """Yield everything there is to tell, problems and what is well; results go to `folder`.

    `folder` is None where the current one was deleted. With `worker` Redis' user is to have the
    rights of a worker too.
    """
    yield judge_program()
    finding, settings = judge_settings()
    yield finding
    yield from judge_disk(folder)
    if settings is not None:
        yield from _redis(settings, worker)


def _redis(settings: Settings, worker: bool) -> Iterator[Finding]:
    url = settings.redis_url.get_secret_value()
    try:
        store = BatchStore.open(url, "warmq-producer", ttl_ms=settings.result_ttl_ms)
        yield from _Looks(store, settings, worker).all()
    except StoreForbidden as error:  # already as the connection is opened
        command = _REFUSED.search(error.message)
        lacks = [command[1] if command else error.message]
        yield problem("redis", "rights_missing", missing=lacks, needed_by=["a producer"])
    except StoreUnavailable as error:
        yield problem("redis", "redis_unusable", url=masked(url), error=error.message)


class _Looks:
    """The looks at one Redis. Each may be forbidden to this user, which is told."""

    def __init__(self, store: BatchStore, settings: Settings, worker: bool) -> None:
        self._store, self._settings, self._worker = store, settings, worker
        url = settings.redis_url.get_secret_value()
        self._url = masked(url)
        # A user of its own may not look through other programs' keys, and each try is noted.
        self._user = credentials_of(url)[0]
        self._limited = self._user not in ("", "default")
        self._primary, self._usable = True, True

    def all(self) -> Iterator[Finding]:
        looks: tuple[tuple[Area, str, Callable[[], Iterable[Finding]]], ...] = (
            ("redis", "INFO (version, append-only file, eviction, memory, disk)", self._server),
            ("redis", "TIME (the clock)", self._clock),
            ("redis", "the rights of this user", self._rights),
            ("queue", "TYPE (keys of other programs)", self._strangers),
            ("workers", "workers, queues and batches", self._work),
            ("redis", "records of gateways", self._records),
            ("queue", "dead letters", lambda: [judge.judge_letters(self._store)]),
        )
        for area, what, look in looks:
            try:
                if self._usable:
                    yield from look()
            except StoreForbidden as error:
                yield remark(area, "forbidden", what=what, error=error.message)
            except StoreRefused:  # as where a key has another type
                found = [*judge.judge_strangers(self._store, self._settings.queue)]
                if not any(finding.level == "problem" for finding in found):
                    raise
                yield from found
                return

    def _server(self) -> Iterator[Finding]:
        info = self._store.info()
        if judge.mode(info) == "sentinel":
            self._usable = False
            yield problem("redis", "sentinel", url=self._url)
            return
        self._primary = info.get("role") == "master"
        yield from judge.judge_server(info, self._url, self._settings.high_water)
        yield from judge.last_writes(info)

    def _clock(self) -> Iterator[Finding]:
        before = time.time()
        redis_s = self._store.now_ms() / 1000
        yield judge.clocks(before, redis_s, time.time())

    def _rights(self) -> Iterator[Finding]:
        if not self._primary:  # a replica refuses to write, whoever asks
            return
        lacks = missing_permissions(self._store, self._settings.queue, worker=self._worker)
        facts = {"needed_by": ["a producer"] + ["a worker"] * self._worker}
        if lacks:
            yield problem("redis", "rights_missing", missing=lacks, **facts)
        else:
            yield ok("redis", "rights", **facts)

    def _records(self) -> Iterator[Finding]:
        most = Records.using(self._store).most_bytes()
        for held in islice(tenant_usage(self._store), _TENANTS):
            yield judge.records(held, most)

    def _strangers(self) -> Iterator[Finding]:
        if self._limited:
            what = [judge.STRANGERS, judge.UNREAD]
            yield remark("queue", "not_looked", user=self._user, what=what)
            return
        for finding in judge.judge_strangers(self._store, self._settings.queue):
            self._usable = finding.level != "problem"
            yield finding

    def _work(self) -> Iterator[Finding]:
        store, heard = self._store, self._store.announcements()
        yield from judge.judge_workers(heard, version())
        batches = store.batches()
        own = self._settings.queue
        yield from judge.judge_queues(store, own, heard, batches)
        if not self._limited:
            served = {str(worker["queue"]) for worker in judge.living(heard)}
            yield from judge.judge_lists(store, sorted(served | {own}))
        yield judge.judge_batches(batches, store.now_ms() / 1000)


#: Free space below which results of a few thousand requests may not fit, and some hundred.
LOW_BYTES = 2**30
FULL_BYTES = 64 * 2**20


def judge_program() -> Finding:
    """Say which program this is."""
    return ok("settings", "version", version=version(), python=platform.python_version())


def judge_settings() -> tuple[Finding, Settings | None]:
    """Say where the settings come from; return them too, None if they are wrong."""
    try:
        settings, given = load(Settings), origins(Settings)
    except SettingsError as error:
        return problem("settings", "settings_wrong", error=error.message), None
    url = masked(settings.redis_url.get_secret_value())
    values = {name: url if name == "redis_url" else getattr(settings, name) for name in given}
    told = [f"WARMQ_{n.upper()}={values[n]} ({place})" for n, place in sorted(given.items())]
    return ok("settings", "settings", given=told, origins=given), settings


def judge_disk(folder: Path | None) -> Iterator[Finding]:
    """Say whether results can be written to a folder, and how much; None is a deleted one."""
    if folder is None:
        gone = "this folder, which was deleted"
        yield remark("disk", "folder_unwritable", folder=gone, free_bytes=0)
        return
    try:
        free = shutil.disk_usage(folder).free
        writable = os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        free, writable = 0, False
    facts = {"folder": str(folder), "free_bytes": free}
    if not writable:
        yield remark("disk", "folder_unwritable", **facts)
    elif free < FULL_BYTES:
        yield problem("disk", "disk_full", **facts)
    elif free < LOW_BYTES:
        yield remark("disk", "disk_low", **facts)
    else:
        yield ok("disk", "disk", **facts)
