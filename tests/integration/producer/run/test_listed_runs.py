"""A run that was interrupted: how the commands show and end its windows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
from kit.commands.doctor_findings import announce
from kit.commands.runs import running
from kit.commands.support import batch_file, run_all, run_producer
from kit.protocol.lessee import QUEUE

from contract.redis.batches import BatchStore
from contract.settings import Settings
from demo.stack import eventually
from producer.run.listed import run_of
from producer.stalls import StallReads

#: Lines of a window, of which a run queues two.
WINDOW = 500


@pytest.fixture
def run(redis_url: str, store: BatchStore, tmp_path: Path) -> Iterator[str]:
    """Return the name of a run that was interrupted after it had queued its two first windows."""
    path = batch_file(tmp_path / "in.jsonl", 3 * WINDOW)
    with running(redis_url, path, tmp_path / "out.jsonl", "--window", str(WINDOW)):
        eventually(lambda: [b.sealed for b in store.batches()] == [True, True], 30, "two windows")
    yield run_of(store.newest_ids()[0])


def row(redis_url: str, run: str) -> list[str]:
    """Return the cells of a run in `producer list`."""
    lines = run_producer("list", redis_url=redis_url).stdout.splitlines()
    return next(line.split() for line in lines if line.startswith(run))


def test_requests_of_a_run_wait_for_a_worker_as_those_of_a_batch_do(
    run: str, store: BatchStore
) -> None:
    def waiting() -> int:
        found = StallReads.using(store).stalls(Settings(), [QUEUE], store.batches())
        return sum(one.facts["waiting"] for one in found if one.code == "queue_unserved")

    assert waiting() == 2 * WINDOW
    for window in store.batches():
        store.cancel(window)
    assert waiting() == 0


def test_a_run_whose_windows_have_ended_is_not_completed(
    run: str, redis_url: str, store: BatchStore
) -> None:
    announce(store)
    run_all(store)
    assert row(redis_url, run)[1:4] == ["in_progress", "1000/1000", "0"]
    assert f"{run}: " in run_producer("list", redis_url=redis_url).stderr


def test_commands_take_the_name_of_a_run_that_list_shows(
    run: str, redis_url: str, store: BatchStore
) -> None:
    shown = run_producer("status", run, "--json", redis_url=redis_url).stdout.splitlines()
    assert [orjson.loads(line)["id"] for line in shown] == [f"{run}.0", f"{run}.1"]
    assert f"{run}.1" in run_producer("status", run, redis_url=redis_url).stdout
    cancelled = run_producer("cancel", run, "--json", redis_url=redis_url)
    assert orjson.loads(cancelled.stdout)["requests"] == 2 * WINDOW
    assert row(redis_url, run)[1:4] == ["cancelled", "0/1000", "0"]
    assert run_producer("delete", run, redis_url=redis_url).returncode == 0
    assert store.batches() == []
    assert run_producer("status", run, redis_url=redis_url).returncode == 2
