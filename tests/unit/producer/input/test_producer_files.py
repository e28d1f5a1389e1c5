"""Output files: whole or not there."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from producer.input.files import AtomicFile, OutputUnwritable, WriteFailed


def test_a_file_appears_only_when_it_is_complete(tmp_path: Path):
    path = tmp_path / "out.jsonl"
    with AtomicFile(path) as file:
        file.write(b"one\n")
        assert not path.exists()
    assert path.read_bytes() == b"one\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_the_earlier_file_as_it_was(tmp_path: Path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"earlier")
    with pytest.raises(KeyboardInterrupt), AtomicFile(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"earlier"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("new", [False, True])
def test_a_commit_fails_if_the_file_is_discarded_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new: bool
):
    """As when a request is cancelled whose commit goes on in another thread."""
    file = AtomicFile(tmp_path / "out.jsonl", new=new)
    file.write(b"one")
    monkeypatch.setattr(os, "fsync", lambda _: file.discard())
    with pytest.raises(WriteFailed):
        file.commit()
    assert not list(tmp_path.iterdir())


def test_a_commit_fails_while_the_file_is_discarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The other way round: the commit comes when the file is removed and not yet closed."""
    file = AtomicFile(tmp_path / "out.jsonl")
    unlink = Path.unlink

    def commits(path: Path, missing_ok: bool = False) -> None:
        unlink(path, missing_ok)
        monkeypatch.setattr(Path, "unlink", unlink)
        with pytest.raises(WriteFailed):
            file.commit()

    monkeypatch.setattr(Path, "unlink", commits)
    file.discard()
    assert not list(tmp_path.iterdir())


def test_a_link_stays_and_its_target_is_replaced_with_its_mode(tmp_path: Path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"earlier")
    target.chmod(0o640)
    link.symlink_to(target)
    with AtomicFile(link) as file:
        file.write(b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    assert target.stat().st_mode & 0o777 == 0o640


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    with AtomicFile(pipe) as file:
        file.write(b"through")
    reader.join()
    assert got == [b"through"]
    assert pipe.is_fifo()


def test_a_folder_that_is_not_there_is_a_clear_error(tmp_path: Path):
    with pytest.raises(OutputUnwritable, match=r"cannot write .*gone/out: No such file"):
        AtomicFile(tmp_path / "gone" / "out")


def test_a_folder_is_no_output_file(tmp_path: Path):
    with pytest.raises(OutputUnwritable, match="Is a directory"):
        AtomicFile(tmp_path)
