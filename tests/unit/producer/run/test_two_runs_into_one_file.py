"""Two runs into one local file, of machines whose locks do not reach each other."""

from __future__ import annotations

import errno
import fcntl
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from contract.errors import BatchConflict
from producer.collect.outputs import ResultFile
from producer.input.files import AtomicFile, OutputUnwritable
from producer.input.reader import Input
from producer.run.append_file import AppendFile
from producer.run.export import Export
from producer.run.journal import Journal, RunFiles, RunProgress


@pytest.fixture(autouse=True)
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)


@pytest.fixture(params=["links", "no links"])
def links(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the folder have hard links, or have none, as exFAT and some network folders."""

    def refused(*_: Any) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    if request.param == "no links":
        monkeypatch.setattr(Path, "hardlink_to", refused)


def run_files(folder: Path, name: str) -> RunFiles:
    begin = RunProgress(name, "", f"{name}.in", f"fingerprint of {name}", "")
    return RunFiles(folder / "out.jsonl", folder / "out.errors.jsonl", begin)


@pytest.mark.usefixtures("links")
@pytest.mark.parametrize("there", [False, True], ids=["no OUT", "an empty OUT"])
@pytest.mark.parametrize("moment", ["before it opens OUT", "before it writes its journal"])
def test_of_two_runs_that_begin_at_once_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, there: bool
) -> None:
    # Given a run that has found no other
    if there:
        (tmp_path / "out.jsonl").touch()
    where: tuple[type, str] = (
        (AppendFile, "__init__") if moment == "before it opens OUT" else (Journal, "write")
    )
    real = getattr(*where)

    def late(self: Any, *args: Any, **options: Any) -> None:
        # When the other one begins meanwhile
        monkeypatch.setattr(*where, real)
        with run_files(tmp_path, "other") as other:
            assert other.done.name == "other"
        real(self, *args, **options)

    monkeypatch.setattr(*where, late)
    # Then it is refused, and the other one's journal is as it was
    with pytest.raises(BatchConflict, match=r"another run (is writing|has just written)"):
        run_files(tmp_path, "mine").__enter__()
    found = Journal(tmp_path / "out.jsonl").read()
    assert found is not None
    assert found.name == "other"


def export_of(folder: Path, ending: str) -> Export:
    """Return a run's export, with its lines and journal."""
    export = Export(str(folder / f"out.{ending}"), str(folder / f"out.errors.{ending}"))
    raw = b'{"id":"a","custom_id":"a","error":null,"response":{"body":{}},"warmq":{"line":1}}\n'
    bad = b'{"id":"b","custom_id":"b","error":{"code":"invalid_json","line":2},"response":null}\n'
    for path, lines in zip(export.line_files, (raw, bad), strict=True):
        path.write_bytes(lines)
    (folder / "in").write_text("x")
    with closing(Input(str(folder / "in"))) as source:
        fingerprint = source.fingerprint()
    export.journal.write(
        RunProgress("r", "", "in", fingerprint, "e", errors=len(bad), failed=1, complete=True)
    )
    return export


@pytest.mark.usefixtures("links")
@pytest.mark.parametrize("taken", ["out.parquet", "out.errors.parquet"])
def test_a_file_that_appeared_meanwhile_is_left_and_the_lines_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: str
) -> None:
    export, real = export_of(tmp_path, "parquet"), ResultFile.sync

    def late(self: ResultFile) -> str:
        (tmp_path / taken).write_bytes(b"of another run")
        return real(self)

    monkeypatch.setattr(ResultFile, "sync", late)
    with pytest.raises(BatchConflict, match=f"{taken} was written by another process meanwhile"):
        export.write("seed")
    assert (tmp_path / taken).read_bytes() == b"of another run"
    assert all(path.exists() for path in export.line_files)
    assert not list(tmp_path.glob(".*"))
    # And what is moved away makes room for the same command
    monkeypatch.setattr(ResultFile, "sync", real)
    (tmp_path / taken).unlink()
    export.write("seed")
    assert not any(path.exists() for path in export.line_files)


@pytest.mark.usefixtures("links")
def test_a_delivery_that_was_killed_before_its_journal_said_so_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = export_of(tmp_path, "parquet")
    export.write("seed")
    whole = (tmp_path / "out.parquet").read_bytes()
    export_of(tmp_path, "parquet").write("seed")
    assert (tmp_path / "out.parquet").read_bytes() == whole
    assert not list(tmp_path.glob("*.lines"))


def test_a_run_is_complete_only_where_its_own_file_is(tmp_path: Path) -> None:
    export = export_of(tmp_path, "parquet")
    export.write("seed")
    out = tmp_path / "out.parquet"
    with closing(Input(str(tmp_path / "in"))) as source:
        assert export.already_written(source, "seed") is not None
        out.write_bytes(out.read_bytes()[::-1])
        with pytest.raises(BatchConflict, match="is not what this run has written"):
            export.already_written(source, "seed")
        out.unlink()  # its errors are left: they would be in the way of what is computed anew
        with pytest.raises(BatchConflict, match=r"out.errors.parquet exists; remove it, or name"):
            export.already_written(source, "seed")
        (tmp_path / "out.errors.parquet").unlink()
        assert export.already_written(source, "seed") is None


def test_a_new_file_in_a_folder_that_is_full_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "hardlink_to", full)
    with (
        pytest.raises(OutputUnwritable, match="No space left"),
        AtomicFile(tmp_path / "a", new=True),
    ):
        pass
    assert not list(tmp_path.iterdir())
