"""Runs `producer doctor` and reads its findings."""

from __future__ import annotations

from typing import Any

import orjson
from kit.commands.support import run_producer
from kit.protocol.lessee import client_of

from contract.naming import DEFAULT_QUEUE
from contract.redis import keys
from contract.redis.announcements import WORKER_SILENT_S
from contract.redis.batches import BatchStore
from contract.version import PROTOCOL, version
from demo.stack import eventually

Found = dict[str, dict[str, Any]]


def doctor(redis_url: str, status: int, **env: str) -> Found:
    """Run it both ways; return the findings by code."""
    done = run_producer("doctor", "--json", redis_url=redis_url, **env)
    assert done.returncode == status, done.stdout + done.stderr
    document = orjson.loads(done.stdout)
    assert document["healthy"] == (status == 0)
    told = run_producer("doctor", redis_url=redis_url, **env)
    assert told.returncode == status
    lines = told.stdout.splitlines()
    assert len(lines) == len(document["findings"])
    for line, finding in zip(lines, document["findings"], strict=True):
        assert line[:2] == {"ok": "ok", "remark": "--", "problem": "!!"}[finding["level"]]
        assert (finding["remedy"] is not None) == (finding["level"] != "ok"), finding
        assert line.endswith(finding["remedy"] or "")
    return {finding["code"]: finding for finding in document["findings"]}


def levels(found: Found, level: str) -> set[str]:
    """Return the codes of the findings of a level."""
    return {code for code, finding in found.items() if finding["level"] == level}


def announce(store: BatchStore, name: str = "celery@a.12.0a1b2c3d", **more: Any) -> None:
    """Leave what a worker says of itself; `silent_s` ago.

    By default in 14 s by Redis' clock: for 16 s its next announcement is not overdue, in which a
    busy machine runs `producer doctor` twice.
    """
    said = {"state": "ready", "queue": DEFAULT_QUEUE, "model": "tiny", "in_flight": 3, "limit": 40,
            "version": version(), "protocol": PROTOCOL} | more  # fmt: skip
    seconds, _ = client_of(store).time()
    record = b"%d\0" % ((seconds - said.pop("silent_s", -14)) * 1000)
    client_of(store).hset(keys.WORKERS, name, record + orjson.dumps(said))


def up_for_long(store: BatchStore) -> None:
    """Wait until Redis has run for so long that a silent worker counts as dead."""
    eventually(lambda: store.up_s() >= WORKER_SILENT_S, 30, "Redis has run for long")
