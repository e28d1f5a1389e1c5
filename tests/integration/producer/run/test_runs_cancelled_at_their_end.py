"""A run that is cancelled when all its rows have ended: no row of it is cancelled."""

from __future__ import annotations

import csv
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen
from typing import Any

import orjson
import pytest
from kit.commands.runs import run_of, running, windows
from kit.commands.support import batch_file, finish, run_all, run_producer
from kit.protocol.lessee import Lessee, client_of

from contract.errors import RequestFailed
from contract.redis.batches import BatchStore
from demo.stack import eventually
from gateway.batches.api.protocol import batch_object
from gateway.redis.batch_views import BatchViews
from producer.cli.progress import CANCELLED_RUN

pytestmark = pytest.mark.timeout(120)
ROWS = 1000
#: Part of the text about where the errors of a complete run are.
ERRORS_ARE = "error_message"


@contextmanager
def queued(redis_url: str, store: BatchStore, *args: str | Path) -> Iterator[Popen[str]]:
    """Start the command; it has queued all its rows, in two windows."""
    with running(redis_url, *args) as process:
        eventually(lambda: [b.sealed for b in windows(store)] == [True, True], 30, "two windows")
        yield process


def states(redis_url: str, store: BatchStore, run: str) -> set[str]:
    """Return the states of a run in the record, the API and the commands."""
    view = BatchViews.using(store).get("", run)
    record = store.batch(run)
    assert view is not None and record is not None
    api = batch_object(view)
    assert api is not None
    shown: dict[str, Any] = orjson.loads(
        run_producer("status", run, "--json", redis_url=redis_url).stdout
    )
    (row,) = [
        line.split()
        for line in run_producer("list", redis_url=redis_url).stdout.splitlines()
        if line.startswith(run)
    ]
    return {record.status, api.status, shown["status"], row[1]}


def test_a_run_that_was_cancelled_too_late_is_completed(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    out = tmp_path / "out.csv"
    command = (batch_file(tmp_path / "in.jsonl", ROWS), out, "--window", "500")
    with queued(redis_url, store, *command):
        pass
    run, lessee = run_of(store), Lessee(client_of(store))
    finish(lessee, lessee.pop(1), RequestFailed("it broke", code="request_failed"))
    run_all(store)
    told = run_producer("cancel", run, redis_url=redis_url).stderr
    assert CANCELLED_RUN in told

    # Its output is not written, so no errors are in it, and the command must run once more
    assert states(redis_url, store, run) == {"cancelled"}
    shown = run_producer("status", run, redis_url=redis_url).stdout
    assert (CANCELLED_RUN in shown, ERRORS_ARE in shown) == (True, False)
    asked = run_producer("status", run, "--request", "r9999", redis_url=redis_url).stderr
    assert "are in OUT" not in asked

    done = run_producer("run", *command, redis_url=redis_url)
    assert (done.returncode, "999 results, 1 failed" in done.stderr) == (1, True)
    assert (f"{run} was" in done.stderr, "--retry cancelled" in done.stderr) == (False, False)
    with out.open() as file:
        assert {one["status"] for one in csv.DictReader(file)} == {"completed", "failed"}
    assert states(redis_url, store, run) == {"completed"}
    shown = run_producer("status", run, redis_url=redis_url).stdout
    assert (CANCELLED_RUN in shown, ERRORS_ARE in shown) == (False, True)
    again = run_producer("cancel", run, redis_url=redis_url).stderr
    assert again == f"{run}: 0 requests cancelled: it has ended already (completed)\n"

    # No line is wrong itself
    again = run_producer("run", *command, "--retry", "cancelled", redis_url=redis_url).stderr
    assert ("nothing runs again" in again, "wrong lines" in again) == (True, False)


def test_a_cancelled_run_is_not_complete_before_its_output_is_in_its_place(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    out = tmp_path / "out.csv"
    command = (batch_file(tmp_path / "in.jsonl", ROWS), out, "--window", "500")
    with queued(redis_url, store, *command) as process:
        run = run_of(store)
        process.send_signal(signal.SIGSTOP)
        run_all(store)
        assert run_producer("cancel", run, redis_url=redis_url).returncode == 0
        out.mkdir()  # the output cannot be put in its place
        process.send_signal(signal.SIGCONT)
        assert process.wait(30) not in (0, 1)
    assert windows(store) == []
    assert states(redis_url, store, run) == {"cancelled"}
    assert CANCELLED_RUN in run_producer("status", run, redis_url=redis_url).stdout
    out.rmdir()
    done = run_producer("run", *command, redis_url=redis_url)
    assert (done.returncode, f"{run} was" in done.stderr) == (0, False)
    assert states(redis_url, store, run) == {"completed"}
