"""A machine whose clock is 10 minutes wrong: leases use Redis's clock, so nobody notices."""

from __future__ import annotations

import datetime as dt
import time
from pathlib import Path

import orjson
import pytest
from kit.commands.support import run_producer, write_lines
from kit.stacks.stage import stage

from demo.stack import ROOT, eventually

#: On a busy machine a gap between sweeps of a third of this is rare; it delays redelivery.
LEASE_S = 6
#: Python runs this before everything else; it moves the clock of the whole process.
WRONG_CLOCK = """
import datetime, os, time
shift = float(os.environ["WRONG_BY_S"])
real, real_ns, real_datetime = time.time, time.time_ns, datetime.datetime
time.time = lambda: real() + shift
time.time_ns = lambda: real_ns() + int(shift * 1e9)
class Wrong(real_datetime):
    @classmethod
    def now(cls, tz=None):
        return real_datetime.now(tz) + datetime.timedelta(seconds=shift)
    @classmethod
    def utcnow(cls):
        return real_datetime.utcnow() + datetime.timedelta(seconds=shift)
datetime.datetime = Wrong
"""


@pytest.mark.parametrize("wrong_by_s", [600, -600])
def test_a_clock_10_minutes_wrong_changes_nothing(tmp_path: Path, wrong_by_s: int) -> None:
    (tmp_path / "sitecustomize.py").write_text(WRONG_CLOCK)
    wrong = {"PYTHONPATH": str(tmp_path), "WRONG_BY_S": str(wrong_by_s)}
    with stage(tmp_path) as on:
        right, skewed = on.worker(lease_s=LEASE_S), on.worker(env=wrong, lease_s=LEASE_S)
        on.ready(right, skewed)
        bodies = {f"c{n}": {"prompt": f"question {n}"} for n in range(300)}
        file = write_lines(tmp_path / "in.jsonl", (
            {"custom_id": i, "method": "POST", "url": "/v1/completions", "body": b}
            for i, b in bodies.items()))  # fmt: skip
        on.bodies["b1"] = bodies
        ran = run_producer(
            "submit", file, "--batch-id", "b1", redis_url=on.server.url,
            WRONG_BY_S=wrong["WRONG_BY_S"], PYTHONPATH=f"{tmp_path}:{ROOT}",
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        on.running(100)
        assert on.computed().again == 0
        # Both have work, nothing was taken from a living worker
        assert on.computed().began_on(right.pid)
        assert on.computed().began_on(skewed.pid)
        # The wrong one dies: its leases end by Redis's clock
        held = on.computed().began_on(skewed.pid)
        on.kill(skewed)
        died = time.monotonic()
        eventually(lambda: any(on.computed().starts[rid] > 1 for rid in held), 20, "begun again")
        assert time.monotonic() - died <= LEASE_S + 2
        on.finish()
        assert right.stop() == 0
        on.settled()
        # The clock was wrong indeed
        told = [dt.datetime.fromisoformat(orjson.loads(raw)["date_done"])
                for raw in on.store.results(on.ids()) if raw]  # fmt: skip
        assert max(told) - min(told) > dt.timedelta(seconds=500)
