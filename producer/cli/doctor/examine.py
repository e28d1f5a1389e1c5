"""Looks at all there is to look at, one thing after the other; nothing is changed."""

import re
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

from contract.errors import StoreForbidden, StoreRefused, StoreUnavailable
from contract.redis.batches import BatchStore
from contract.redis.connect import credentials_of, masked
from contract.redis.records import Records
from contract.settings import Settings
from contract.version import version
from producer.cli.doctor import here, server, workers
from producer.cli.doctor.finding import Area, Finding, ok, problem, remark
from producer.cli.gateway_records import held_by_tenants
from producer.redis import rights

#: Tenants whose records are told of, the largest first.
_TENANTS = 3
#: How Redis names the command that a user may not run.
_REFUSED = re.compile(r"run the '([^']+)' command")


def examine(folder: Path | None, *, worker: bool = False) -> Iterator[Finding]:
    """Yield everything there is to tell, problems and what is well; results go to `folder`.

    `folder` is None where the current one was deleted. With `worker` Redis' user is to have the
    rights of a worker too.
    """
    yield here.judge_program()
    finding, settings = here.judge_settings()
    yield finding
    yield from here.judge_disk(folder)
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
            ("queue", "dead letters", lambda: [workers.judge_letters(self._store)]),
        )
        for area, what, look in looks:
            try:
                if self._usable:
                    yield from look()
            except StoreForbidden as error:
                yield remark(area, "forbidden", what=what, error=error.message)
            except StoreRefused:  # as where a key has another type
                found = [*workers.judge_strangers(self._store, self._settings.queue)]
                if not any(finding.level == "problem" for finding in found):
                    raise
                yield from found
                return

    def _server(self) -> Iterator[Finding]:
        info = self._store.info()
        if server.mode(info) == "sentinel":
            self._usable = False
            yield problem("redis", "sentinel", url=self._url)
            return
        self._primary = info.get("role") == "master"
        yield from server.judge(info, self._url, self._settings.high_water)
        yield from server.last_writes(info)

    def _clock(self) -> Iterator[Finding]:
        before = time.time()
        redis_s = self._store.now_ms() / 1000
        yield server.clocks(before, redis_s, time.time())

    def _rights(self) -> Iterator[Finding]:
        if not self._primary:  # a replica refuses to write, whoever asks
            return
        lacks = rights.missing(self._store, self._settings.queue, worker=self._worker)
        facts = {"needed_by": ["a producer"] + ["a worker"] * self._worker}
        if lacks:
            yield problem("redis", "rights_missing", missing=lacks, **facts)
        else:
            yield ok("redis", "rights", **facts)

    def _records(self) -> Iterator[Finding]:
        most = Records.beside(self._store).most_bytes()
        for held in islice(held_by_tenants(self._store), _TENANTS):
            yield server.records(held, most)

    def _strangers(self) -> Iterator[Finding]:
        if self._limited:
            what = [workers.STRANGERS, workers.UNREAD]
            yield remark("queue", "not_looked", user=self._user, what=what)
            return
        for finding in workers.judge_strangers(self._store, self._settings.queue):
            self._usable = finding.level != "problem"
            yield finding

    def _work(self) -> Iterator[Finding]:
        store, heard = self._store, self._store.announcements()
        yield from workers.judge_workers(heard, version())
        batches = store.batches()
        own = self._settings.queue
        yield from workers.judge_queues(store, own, heard, batches)
        if not self._limited:
            served = {str(worker["queue"]) for worker in workers.living(heard)}
            yield from workers.judge_lists(store, sorted(served | {own}))
        yield workers.judge_batches(batches, store.now_ms() / 1000)
