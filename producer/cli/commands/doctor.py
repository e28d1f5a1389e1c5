"""Implements `producer doctor`, which runs all checks and prints their findings."""

import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

import click

from contract.errors import StoreForbidden, StoreRefused, StoreUnavailable
from contract.redis.batches import BatchStore
from contract.redis.connect import credentials_of, masked
from contract.redis.records import Records
from contract.settings import Settings, SettingsError, load, origins
from contract.version import version
from producer.cli import options, show
from producer.cli.context import Exit
from producer.cli.doctor import server, work
from producer.cli.doctor.finding import Area, Finding, ok, problem, remark
from producer.cli.marks import MARKS
from producer.cli.progress import counted, tell
from producer.cli.show import size_text
from producer.redis import tenant_usage

#: Most tenants whose records are reported; those with the largest records come first.
_TENANTS = 3
#: Bytes of free disk space below which thousands of results may not fit.
LOW_BYTES = 2**30
#: Bytes of free disk space below which hundreds of results may not fit.
FULL_BYTES = 64 * 2**20
#: Pattern of Redis's error for a command that a user may not run.
_REFUSED = re.compile(r"run the '([^']+)' command")


@click.command("doctor")
@click.option("--worker", is_flag=True, help="Also check the rights that a worker needs in Redis.")
@options.as_json
def command(*, worker: bool, as_json: bool) -> Exit:
    """Check Redis, workers, queues, disk and settings, and name what stops the work.

    The command changes nothing. Each line begins with `ok`, with `--` if you may want
    to change something, or with `!!` if something stops the work; the remedy follows
    the colon. Exit status: 0; 1 if there is a `!!`; 3 if Redis cannot be used.
    """
    findings = []
    for finding in _examine(worker=worker):
        findings.append(finding)
        if not as_json:
            line = f"{MARKS[finding.level]}  {finding.area:<8}  {finding.text}"
            line += f": {finding.remedy}" if finding.remedy else ""
            click.echo(show.printable(line))
    problems = sum(finding.level == "problem" for finding in findings)
    if as_json:
        show.put_json({"object": "warmq.doctor", "healthy": not problems, "findings": findings})
    else:
        tell(counted(problems, "problem"))
    if any(finding.code == "redis_unusable" for finding in findings):
        return Exit.UNREACHABLE
    return Exit.SOME_FAILED if problems else Exit.ALL_WELL


def _examine(*, worker: bool) -> Iterator[Finding]:
    """Run all checks; with `worker`, Redis's user must have the rights of a worker too."""
    facts = {"version": version(), "python": platform.python_version()}
    yield ok("settings", "version", f"warmq {version()}, Python {facts['python']}", **facts)
    try:
        settings, origin_of = load(Settings), origins(Settings)
    except SettingsError as error:
        remedy = "correct it in the environment, .env or warmq.toml"
        yield problem("settings", "settings_wrong", error.message, remedy, error=error.message)
        yield check_disk()
        return
    url = settings.redis_url.get_secret_value()
    values = {name: getattr(settings, name) for name in origin_of} | {"redis_url": masked(url)}
    lines = [
        f"WARMQ_{name.upper()}={values[name]} ({origin_of[name]})" for name in sorted(origin_of)
    ]
    text = ", ".join(lines) or "all settings have their defaults"
    yield ok("settings", "settings", text, given=lines, origins=origin_of)
    yield check_disk()
    try:
        store = BatchStore.open(url, "warmq-producer", ttl_ms=settings.result_ttl_ms)
        yield from _RedisChecks(store, settings, worker).run()
    except StoreForbidden as error:  # raised when the connection is opened
        refused = _REFUSED.search(error.message)
        missing = [refused[1] if refused else error.message]
        yield server.rights_missing(missing, ["a producer"])
    except StoreUnavailable as error:
        yield problem(
            "redis", "redis_unusable", f"cannot be used: {error.message}",
            "start Redis, or correct WARMQ_REDIS_URL", url=masked(url), error=error.message,
        )  # fmt: skip


def check_disk() -> Finding:
    """Check that results can be written to the current folder."""
    folder, free, writable = "this folder, which was deleted or cannot be read", 0, False
    try:
        folder = str(Path.cwd())
        free = shutil.disk_usage(folder).free
        writable = os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        writable = False
    facts = {"folder": folder, "free_bytes": free}
    text = f"only {size_text(free)} free in {folder}"
    if not writable:
        text = f"no file can be written in {folder}"
        remedy = "change to another folder, or name one with -o"
        return remark("disk", "folder_unwritable", text, remedy, **facts)
    if free < FULL_BYTES:
        return problem("disk", "disk_full", text, "free some, or write elsewhere", **facts)
    if free < LOW_BYTES:
        return remark("disk", "disk_low", text, "free some before you collect here", **facts)
    return ok("disk", "disk", text.removeprefix("only "), **facts)


class _RedisChecks:
    """Runs the checks of one Redis. A check that this user may not run becomes a remark."""

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
            ("queue", f"{work.FOREIGN_KEYS} (TYPE)", self._foreign_keys),
            ("workers", "workers, queues and batches", self._work),
            ("redis", "records of gateways", self._records),
            ("queue", "dead letters", lambda: [work.check_dead_letters(self._store)]),
        )
        for area, what, check in checks:
            try:
                if self._usable:
                    yield from check()
            except StoreForbidden as error:
                yield work.forbidden(area, what, error)
            except StoreRefused:  # for example, a key has another type
                findings = [*work.foreign_keys(self._store, self._settings.queue)]
                if not any(finding.level == "problem" for finding in findings):
                    raise
                yield from findings
                return

    def _server(self) -> Iterator[Finding]:
        info, url = self._store.info(), masked(self._url)
        if server.server_mode(info) == "sentinel":
            self._usable = False
            text = f"{url} is a Sentinel, which holds no data"
            remedy = "write WARMQ_REDIS_URL=sentinel://user:password@host:26379/0?master=NAME"
            yield problem("redis", "sentinel", text, remedy, url=url)
            return
        self._primary = info.get("role") == "master"
        yield from server.check_server(info, url, self._settings.high_water)

    def _clock(self) -> Iterator[Finding]:
        before = time.time()
        redis_s = self._store.now_ms() / 1000
        yield server.check_clocks(before, redis_s, time.time())

    def _rights(self) -> Iterator[Finding]:
        if self._primary:  # a replica refuses every write
            yield server.check_rights(self._store, self._settings.queue, worker=self._worker)

    def _records(self) -> Iterator[Finding]:
        most = Records.using(self._store).most_bytes()
        for usage in islice(tenant_usage(self._store), _TENANTS):
            yield server.check_tenant_records(usage, most)

    def _foreign_keys(self) -> Iterator[Finding]:
        if self._restricted:
            what = [work.FOREIGN_KEYS, work.UNREAD_LISTS]
            text = f"not checked: {', '.join(what)}; the check reads all keys, and {self._user} is "
            text, remedy = f"{text}a restricted user", "run doctor once as Redis's default user"
            yield remark("queue", "not_looked", text, remedy, user=self._user, what=what)
            return
        for finding in work.foreign_keys(self._store, self._settings.queue):
            self._usable = finding.level != "problem"
            yield finding

    def _work(self) -> Iterator[Finding]:
        return work.check_work(self._store, self._settings, restricted=self._restricted)
