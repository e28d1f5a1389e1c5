"""A worker whose next announcement is overdue: `doctor` and `top` do not call it ready."""

from __future__ import annotations

import re

from kit.commands.doctor_findings import announce, doctor
from kit.commands.support import run_producer

from contract.redis.batches import BatchStore
from demo.stack import RedisServer


def test_doctor_has_the_age_of_its_announcement(own: RedisServer, own_store: BatchStore) -> None:
    announce(own_store, "celery@a.1.0", silent_s=4)
    announce(own_store, "celery@b.2.0")
    found = doctor(own.url, 0)
    assert "celery@b.2.0: ready" in found["worker"]["text"]
    text = found["worker_silent"]["text"]
    assert re.match(r"celery@a.1.0 last announced itself 0:00:[01]\d ago \(ready", text)


def test_top_has_the_age_of_its_announcement(redis_url: str, store: BatchStore) -> None:
    announce(store, "celery@a.1.0", silent_s=4)
    lines = run_producer("top", redis_url=redis_url).stdout.splitlines()
    (row,) = (line for line in lines if line.startswith("celery@a.1.0"))
    assert "seen 0:00:" in row
    assert "ready" not in row
