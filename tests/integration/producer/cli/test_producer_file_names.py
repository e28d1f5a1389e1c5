"""A command's input, outputs and journal are different files, whatever their names are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from kit.commands.support import batch_file, finish, run_producer
from kit.protocol.lessee import Lessee, client_of, submit_batch

from contract.redis.batches import BatchStore

pytestmark = pytest.mark.timeout(120)


def same_name(there: Path, other: Path) -> Path:
    return there


def symbolic_link(there: Path, other: Path) -> Path:
    other.symlink_to(there)
    return other


def hard_link(there: Path, other: Path) -> Path:
    other.hardlink_to(there)
    return other


@pytest.mark.parametrize("name", [same_name, symbolic_link, hard_link])
def test_no_file_is_input_and_output_at_once(
    redis_url: str, store: BatchStore, tmp_path: Path, name: Callable[[Path, Path], Path]
) -> None:
    source = batch_file(tmp_path / "in.jsonl", 3)
    text, out = source.read_bytes(), tmp_path / "out.jsonl"
    twin = name(source, tmp_path / "twin.jsonl")
    for command in (
        ["run", source, out, "--errors", twin],
        ["run", source, twin],
        ["submit", source, "-o", out, "--errors", twin],
        ["submit", source, "-o", twin],
        ["submit", source, "--errors", twin],
    ):
        done = run_producer(*command, redis_url=redis_url)
        assert (done.returncode, "same file" in done.stderr) == (2, True), (command, done.stderr)
        assert source.read_bytes() == text
        assert store.batches() == []


def test_the_files_that_a_command_names_by_itself_are_none_of_the_others_either(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    """The error file beside OUT, the journal of a run, and where standard streams lead."""
    errors = batch_file(tmp_path / "out.errors.jsonl", 3)
    progress = batch_file(tmp_path / "out.jsonl.progress", 3)
    out = tmp_path / "out.jsonl"
    submit_batch(store, 2)
    finish(lessee := Lessee(client_of(store)), lessee.pop())
    (tmp_path / "twin.errors.jsonl").symlink_to(tmp_path / "twin.jsonl")
    before = {path: path.read_bytes() for path in (errors, progress)}
    for command in (
        ["submit", errors, "-o", out],
        ["run", errors, out],
        ["run", progress, out],
        ["run", progress, out, "--errors", tmp_path / "bad"],
        ["run", errors, out, "--errors", progress],
        ["results", "b1", "-o", tmp_path / "twin.jsonl"],
    ):
        done = run_producer(*command, redis_url=redis_url)
        assert (done.returncode, "same file" in done.stderr) == (2, True), (command, done.stderr)
    with errors.open() as stdin:
        from_stdin = run_producer("run", "-", errors, redis_url=redis_url, stdin=stdin)
    assert (from_stdin.returncode, "same file" in from_stdin.stderr) == (2, True)
    assert {path: path.read_bytes() for path in (errors, progress)} == before


def test_results_and_errors_may_both_go_to_a_device(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    submit_batch(store, 2)
    finish(lessee := Lessee(client_of(store)), lessee.pop())
    done = run_producer(
        "results", "b1", "-o", "/dev/null", "--errors", "/dev/null", redis_url=redis_url
    )
    assert done.returncode == 0, done.stderr
