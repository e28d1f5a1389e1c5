"""A run from bucket to bucket that is killed: never half an object, and it goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kit.commands.bucket_run import (
    MAP,
    BucketRun,
    answers_in,
    answers_of_lines,
    upload,
    write_same_lines,
    write_table,
)
from kit.commands.support import run_producer
from kit.servers.s3 import Gate, credentials, s3_server, there, unfinished
from kit.stacks.celery_side import simulated

from producer.run.export import Export

ROWS = 20_000
MIB = 2**20


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Return an S3 server that may hold what completes an object; the run talks to it."""
    with s3_server() as url, Gate(url, "out") as gate:
        for name, value in credentials(gate.url).items():
            monkeypatch.setenv(name, value)
        yield gate


@pytest.mark.timeout(240)
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_run_killed_at_any_stage_leaves_no_half_object_and_goes_on(
    redis_url: str, gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.chdir(tmp_path)  # where the journal of a run into a bucket is
    gate.name = out = f"out.{ending}"
    table, same = tmp_path / "in.parquet", tmp_path / "in.jsonl"
    write_table(table, ROWS)
    write_same_lines(same, ROWS)
    upload(table, "in.parquet")
    journal = Export(f"s3://warmq/{out}", "s3://warmq/errors").journal

    def windows(count: int) -> Callable[[], bool]:
        def reached() -> bool:
            done = journal.read()
            return done is not None and done.windows >= count

        return reached

    args = ("run", "s3://warmq/in.parquet", f"s3://warmq/{out}", *MAP, "--window", "4000")

    def killed(moment: Callable[[], bool]) -> tuple[int, str] | None:
        """Kill a run at a moment; return what is in the bucket then."""
        run = BucketRun(tmp_path, redis_url, *args)
        assert run.until(moment, 100), run.told()
        run.kill()
        return answers_in(out)

    with simulated(redis_url, tmp_path / "worker.log"):
        done = run_producer("run", same, tmp_path / "same.jsonl", redis_url=redis_url)
        assert done.returncode == 0, done.stderr
        whole = (tmp_path / "same.jsonl").read_bytes()
        assert len(whole) > 8 * MIB  # the object of lines has more than one part
        expected = answers_of_lines(whole.splitlines())
        assert expected[0] == ROWS
        for count in (0, 1, 3):
            assert killed(windows(count)) is None
        gate.hold("request")
        assert killed(gate.held.is_set) is None
        assert (unfinished(gate.url) > 0) == (ending == "jsonl")
        gate.let_go()
        gate.hold("answer")
        assert killed(gate.held.is_set) == expected
        gate.let_go()
        run = BucketRun(tmp_path, redis_url, *args)
        assert run.ended(100) == 0, run.told()
    assert answers_in(out) == expected
    assert there(gate.url) == ["in.parquet", out]
    assert not list(tmp_path.glob("*.lines"))
