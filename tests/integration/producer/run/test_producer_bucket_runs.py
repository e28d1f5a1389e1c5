"""`run` from and into buckets: one run delivers an object, and knows its own."""

from __future__ import annotations

import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import obstore
import orjson
import pytest
from kit.commands.bucket_objects import parquet_bytes, put, read, request_lines, rows
from kit.commands.support import (
    producer_command,
    producer_env,
)
from kit.servers.s3 import there, unfinished
from kit.stacks.celery_side import simulated

from contract.errors import BatchConflict
from producer.input.bucket import ObjectPlace
from producer.input.files import ObjectFile
from producer.input.reader import Input
from producer.run.export import Export
from producer.run.journal import RunProgress

pytestmark = pytest.mark.usefixtures("bucket_environment")
MAP = ("--map", "prompt={text}", "--map", "custom_id=id")


def run_command(*args: str | Path, cwd: Path, redis_url: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        producer_command("run", *args), env=producer_env(redis_url), cwd=cwd,
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


def test_a_run_from_bucket_to_bucket_gives_what_a_run_of_files_gives(
    redis_url: str, bucket: Any, s3: str, tmp_path: Path
):
    name = put(bucket, "in.parquet", parquet_bytes(3000))
    (tmp_path / "in.jsonl").write_bytes(request_lines(3000))
    with simulated(redis_url, tmp_path / "worker.log"):
        window = ("--window", "1000")
        for args in (("in.jsonl", "out.jsonl"), (name, "s3://warmq/out.parquet", *MAP)):
            done = run_command(*args, *window, cwd=tmp_path, redis_url=redis_url)
            assert done.returncode == 0, done.stderr
        again = run_command(
            name, "s3://warmq/out.parquet", *MAP, *window, cwd=tmp_path, redis_url=redis_url
        )
        assert "was complete already, 3000 results" in again.stderr
        other = run_command(
            name, "s3://warmq/out.parquet", "--map", "prompt=id", cwd=tmp_path, redis_url=redis_url
        )
        assert other.returncode == 2
        assert "is of a run of another input or with other options" in other.stderr
    lines = [orjson.loads(line) for line in (tmp_path / "out.jsonl").read_bytes().splitlines()]
    answers = [(line["custom_id"], line["response"]["body"]["choices"]) for line in lines]
    table = rows(read(bucket, "out.parquet"))
    assert [
        (row["custom_id"], orjson.loads(row["response"])["choices"]) for row in table
    ] == answers
    assert unfinished(s3) == 0
    assert not list(tmp_path.glob("*.lines"))


def test_an_object_that_no_run_has_left_is_not_replaced(
    redis_url: str, bucket: Any, tmp_path: Path
):
    put(bucket, "out.jsonl", b"mine\n")
    (tmp_path / "in.jsonl").write_bytes(request_lines(3))
    done = run_command("in.jsonl", "s3://warmq/out.jsonl", cwd=tmp_path, redis_url=redis_url)
    assert done.returncode == 2
    assert "s3://warmq/out.jsonl exists" in done.stderr
    assert read(bucket, "out.jsonl") == b"mine\n"


def test_a_run_into_a_parquet_file_here_leaves_nothing_else(redis_url: str, tmp_path: Path):
    bad = b'{"custom_id": "odd", "prompt": 7.5}\n'
    (tmp_path / "in.jsonl").write_bytes(request_lines(700) + bad)
    with simulated(redis_url, tmp_path / "worker.log"):
        done = run_command("in.jsonl", "out.parquet", cwd=tmp_path, redis_url=redis_url)
    assert done.returncode == 1, done.stderr
    table = rows((tmp_path / "out.parquet").read_bytes())
    assert [row["line"] for row in table] == list(range(1, 702))
    assert (table[-1]["custom_id"], table[-1]["status"]) == ("odd", "failed")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "in.jsonl", "out.parquet", "out.parquet.lines.progress", "worker.log",
    ]  # fmt: skip


def test_what_a_run_delivers_goes_up_in_larger_parts_the_more_it_is(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    export = Export("s3://warmq/out.jsonl", "s3://warmq/out.errors.jsonl")
    for size, parts in ((0, 3), (60 * 10**9, 2)):  # the journal says how much there is
        export.line_files[0].write_bytes(b'{"id":"%s"}\n' % (b"x" * 2**20) * 20)
        export.journal.write(RunProgress("r", "", "in", "f", "e", output=size))
        export.write("seed")
        assert obstore.head(bucket, "out.jsonl")["e_tag"].endswith(f'-{parts}"')


@pytest.mark.parametrize("lines", [1, 20])
def test_of_two_runs_into_one_object_the_second_keeps_its_lines(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3: str, lines: int
):
    content = {}
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        export = Export("s3://warmq/out.jsonl", "s3://warmq/out.errors.jsonl")
        content[name] = b'{"id":"%s"}\n' % (name.encode() * (2**20 + ord(name))) * lines
        export.line_files[0].write_bytes(content[name])
        export.journal.write(RunProgress("r", "", "in", "f", "e"))
        if name == "a":
            export.write("seed")
            export.line_files[0].write_bytes(content[name])
            export.write("seed")  # as after a kill before the journal said so
        else:
            with pytest.raises(BatchConflict, match="was written by another process"):
                export.write("seed")
            assert export.line_files[0].read_bytes() == content[name]
    assert read(bucket, "out.jsonl") == content["a"]
    assert unfinished(s3) == 0


@pytest.mark.parametrize("lines", [1, 20])
def test_of_two_deliveries_at_once_one_is_refused_and_keeps_its_lines(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3: str, lines: int
):
    """The second ends while the first, which has found nothing there, is still writing; the lines
    of both have the same size."""
    monkeypatch.chdir(tmp_path)
    content = {name: b'{"id":"%s"}\n' % (name.encode() * 2**20) * lines for name in "ab"}
    first = ObjectFile("s3://warmq/out.jsonl", owner="run_a")
    first.write(content["a"])
    complete = first._upload.close if lines > 1 else None

    def second() -> None:
        with ObjectFile("s3://warmq/out.jsonl", owner="run_b") as file:
            file.write(content["b"])

    class Late:
        """The end of the first upload; the second one tries just before it."""

        def close(self) -> None:
            with pytest.raises(BatchConflict, match="another run is writing s3://warmq/out"):
                second()
            assert complete is not None
            complete()

        def __exit__(self, *error: object) -> None:
            raise AssertionError("discarded")

    if lines > 1:
        first._upload = Late()
    first.__exit__(None)
    with pytest.raises(BatchConflict, match="was written by another process"):
        second()
    assert read(bucket, "out.jsonl") == content["a"]
    assert (unfinished(s3), there(s3)) == (0, ["out.jsonl"])
    assert first.fingerprint == ObjectPlace("s3://warmq/out.jsonl").fingerprint()


def test_a_delivery_that_was_killed_while_it_wrote_goes_on(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3: str
):
    obstore.put(bucket, "out.jsonl.writing", b"run_a")
    large = b'{"id":"%s"}\n' % (b"a" * 2**20) * 20
    for owner in ("run_b", "run_a"):
        file = ObjectFile("s3://warmq/out.jsonl", owner=owner)
        file.write(large)
        if owner == "run_a":
            file.__exit__(None)
            continue
        with pytest.raises(BatchConflict, match="another run is writing"):
            file.__exit__(None)
    assert (read(bucket, "out.jsonl"), there(s3)) == (large, ["out.jsonl"])


def test_a_run_is_complete_only_where_its_own_object_is(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    export = Export("s3://warmq/out.jsonl", "s3://warmq/out.errors.jsonl")
    (tmp_path / "in").write_text("x")
    export.line_files[0].write_bytes(b'{"id":"a"}\n')
    with closing(Input(str(tmp_path / "in"))) as source:
        begin = RunProgress("r", "", "in", source.fingerprint(), "e", complete=True)
        export.journal.write(begin)
        export.write("seed")
        assert export.already_written(source, "seed") is not None
        obstore.put(bucket, "out.jsonl", b'{"id":"b"}\n')
        with pytest.raises(BatchConflict, match="is not what this run has written"):
            export.already_written(source, "seed")


def test_a_run_of_a_pipe_into_a_bucket_is_not_taken_for_another_that_has_ended(
    redis_url: str, bucket: Any, tmp_path: Path
):
    def run(count: int) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            producer_command("run", "-", "s3://warmq/out.jsonl"), env=producer_env(redis_url),
            cwd=tmp_path, input=request_lines(count), capture_output=True, timeout=50, check=False,
        )  # fmt: skip

    with simulated(redis_url, tmp_path / "worker.log"):
        assert run(3).returncode == 0
        other = run(4)
    assert other.returncode == 2
    assert b"is of a run of another input" in other.stderr
    assert len(read(bucket, "out.jsonl").splitlines()) == 3
