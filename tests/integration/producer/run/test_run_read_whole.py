"""The mark of a run that may read more lines, in the commands."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kit.commands.runs import run_of, running, windows
from kit.commands.support import batch_file, run_producer
from kit.protocol.lessee import QUEUE

from contract.redis.batches import BatchStore
from demo.stack import eventually
from producer.run.journal import RunProgress
from producer.run.record import RunRecord
from producer.submit.submission import Submission


def test_a_run_that_has_read_its_file_is_not_marked_until_it_begins_again(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    command = (batch_file(tmp_path / "in.jsonl", 700), tmp_path / "out.jsonl", "--window", "500")

    def counts() -> str:
        lines = run_producer("list", redis_url=redis_url).stdout.splitlines()
        return next(line.split()[2] for line in lines if line.startswith(run))

    with running(redis_url, *command):
        eventually(lambda: [b.sealed for b in windows(store)] == [True, True], 30, "two windows")
        run = run_of(store)
        eventually(lambda: counts() == "0/700", 30)
    assert "may read more" not in run_producer("list", redis_url=redis_url).stderr
    top = run_producer("top", redis_url=redis_url).stdout
    assert "700" in top and "700+" not in top
    # The same command reads the file again
    files: Any = SimpleNamespace(done=RunProgress(run, "s", "in", "f", errors_file=""), again=())
    source: Any = SimpleNamespace(name="in")
    RunRecord(store, Submission("run", QUEUE, 5), source, files)
    assert counts() == "0/700+"
    with running(redis_url, *command):
        eventually(lambda: counts() == "0/700", 30)
