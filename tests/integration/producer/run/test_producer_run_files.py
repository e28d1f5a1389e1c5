"""`producer run` touches its own files only, and goes on only with those it left."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from kit.commands.runs import (
    custom_ids,
    done_windows,
    journal_of,
    run_of,
    running,
    served,
    stopped_after_one_window,
    windows,
)
from kit.commands.support import (
    batch_file,
    chat_line,
    finish,
    run_all,
    run_producer,
    write_lines,
)
from kit.protocol.lessee import Lessee, client_of
from kit.stacks.celery_side import simulated

from contract.redis.batches import BatchStore
from demo.stack import eventually
from producer.cli.main import cli
from producer.run.export import Export

pytestmark = pytest.mark.timeout(120)


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize("harm", [Path.unlink, shorten])
def test_an_output_that_lost_a_part_is_refused_and_not_filled_up(
    redis_url: str, store: BatchStore, tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    source, out = batch_file(tmp_path / "in.jsonl", 1200), tmp_path / "out.jsonl"
    stopped_after_one_window(redis_url, store, source, out)
    journal = journal_of(out).read_bytes()
    harm(out)
    left = out.read_bytes() if out.exists() else None
    run_all(store)
    done = run_producer("run", source, out, "--window", "500", redis_url=redis_url)
    assert done.returncode == 2
    assert "results are missing" in done.stderr
    assert (out.read_bytes() if out.exists() else None) == left
    assert journal_of(out).read_bytes() == journal


def stopped_with_an_error(redis_url: str, store: BatchStore, folder: Path) -> tuple[Path, Path]:
    """Leave a run of 1,200 lines after the first window, in which one line was bad."""
    lines = [chat_line(f"r{n}") for n in range(1200)]
    lines[7] = chat_line("bad", max_tokens=-1)
    source, out = write_lines(folder / "in.jsonl", lines), folder / "out.jsonl"
    stopped_after_one_window(redis_url, store, source, out, "--errors", folder / "bad.jsonl")
    return source, out


def test_another_error_file_than_the_run_began_with_is_refused(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    source, out = stopped_with_an_error(redis_url, store, tmp_path)
    run_all(store)
    other = run_producer("run", source, out, "--window", "500", redis_url=redis_url)
    assert other.returncode == 2
    assert f"that wrote {tmp_path / 'out.jsonl'} are in {tmp_path / 'bad.jsonl'}" in other.stderr
    assert not (tmp_path / "out.errors.jsonl").exists()
    # The one that it began with goes on, also by another name of it
    status, told = served(
        redis_url, store, source, out, "--window", "500", "--errors", f"{tmp_path}/./bad.jsonl"
    )
    assert status == 1, told
    assert custom_ids(tmp_path / "bad.jsonl") == ["bad"]
    assert len(custom_ids(out)) == 1199


def test_a_folder_with_a_stopped_run_can_be_moved(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    folder = tmp_path / "before"
    folder.mkdir()
    source, out = stopped_with_an_error(redis_url, store, folder)
    run_all(store)
    moved = folder.rename(tmp_path / "after")
    status, told = served(
        redis_url, store, moved / source.name, moved / out.name, "--window", "500",
        "--errors", moved / "bad.jsonl",
    )  # fmt: skip
    assert status == 1, told
    assert len(custom_ids(moved / out.name)) == 1199


@pytest.mark.parametrize("text", ["mine\n", ""])
def test_an_error_file_that_no_run_has_left_is_not_touched(
    redis_url: str, store: BatchStore, tmp_path: Path, text: str
) -> None:
    source, out = batch_file(tmp_path / "in.jsonl", 3), tmp_path / "out.jsonl"
    mine = tmp_path / "out.errors.jsonl"
    mine.write_text(text)
    done = run_producer("run", source, out, redis_url=redis_url)
    assert (done.returncode, f"{mine} exists" in done.stderr) == (2, True)
    assert mine.read_text() == text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.errors.jsonl"]
    assert windows(store) == []


def test_an_input_that_only_begins_like_the_one_of_the_run_is_refused(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    source, out = batch_file(tmp_path / "in.jsonl", 1200), tmp_path / "out.jsonl"
    stopped_after_one_window(redis_url, store, source, out)
    whole = source.read_bytes()
    for other in (
        b"".join(whole.splitlines(keepends=True)[:500]),  # what is done, and no more
        whole + b'{"prompt":"one more"}\n',
        whole.replace(b"question 1199", b"question 9911"),
    ):
        source.write_bytes(other)
        done = run_producer("run", source, out, "--window", "500", redis_url=redis_url)
        assert (done.returncode, "another input" in done.stderr) == (2, True), done.stderr
    source.write_bytes(whole)
    status, told = served(redis_url, store, source, out, "--window", "500")
    assert status == 0, told
    assert len(custom_ids(out)) == 1200


def test_an_input_that_is_cut_while_it_is_read_ends_the_run(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    # Given a file of which a run has read two windows of three
    lines = [chat_line(f"r{n}", "x" * 1000) for n in range(1500)]
    source, out = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    whole = source.read_bytes()
    with running(redis_url, source, out, "--window", "500") as process:
        eventually(lambda: len(windows(store)) == 2, 20)
        os.truncate(source, whole.index(b"\n", len(whole) * 9 // 10) + 1)
        eventually(lambda: run_all(store) == 0 and process.poll() is not None, 30)
        assert process.stderr is not None
        told = process.stderr.read()
    assert (process.returncode, "has changed while it was read" in told) == (2, True), told
    assert "to start again" in told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            '{"name":"run_1","digest":"00","line":0,"windows":0,"output":0,"errors":0,'
            '"completed":0,"failed":0}',
            "another version",
        ),
        ('{"format":99,"name":"run_1"}', "another version"),
        ('{"format":2,"name":7}', "not a journal"),
        ("my own notes\n", "not a journal"),
        ("[]", "not a journal"),
        ("\xff", "not a journal"),
    ],
)
def test_a_progress_file_that_is_no_journal_of_this_version_is_refused_in_words(
    redis_url: str, tmp_path: Path, text: str, told: str
) -> None:
    source, out = batch_file(tmp_path / "in.jsonl", 3), tmp_path / "out.jsonl"
    journal_of(out).write_text(text, "latin-1")
    done = run_producer("run", source, out, redis_url=redis_url)
    assert (done.returncode, told in done.stderr) == (2, True), done.stderr
    assert "Traceback" not in done.stderr
    assert journal_of(out).read_text("latin-1") == text
    assert not out.exists()


@pytest.mark.parametrize("which", ["out", "errors", "progress"])
@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_regular_file_cannot_be_gone_on_with(
    redis_url: str, tmp_path: Path, which: str, make: Callable[[Path], None]
) -> None:
    source, out, errors = (tmp_path / name for name in ("in.jsonl", "out", "errors"))
    batch_file(source, 3)
    make({"out": out, "errors": errors, "progress": journal_of(out)}[which])
    done = run_producer("run", source, out, "--errors", errors, redis_url=redis_url)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    told = "it is a folder" if make is Path.mkdir else "it is not a regular file"
    assert told in done.stderr


def test_a_device_cannot_be_gone_on_with(redis_url: str, tmp_path: Path) -> None:
    source = batch_file(tmp_path / "in.jsonl", 3)
    for name in ("/dev/null", "/dev/stdout", "-"):
        done = run_producer("run", source, name, redis_url=redis_url)
        assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr


def test_a_longer_file_in_the_place_of_an_output_is_not_cut(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    source, out = batch_file(tmp_path / "in.jsonl", 1200), tmp_path / "out.jsonl"
    stopped_after_one_window(redis_url, store, source, out)
    run_all(store)
    ours = out.read_bytes()
    other = ours.splitlines(keepends=True)[0].replace(b"batch_req_", b"batch_req_" + b"0" * 8)
    for foreign in (b"something else\n" * 20_000, ours + b"and more\n", ours + other):
        out.write_bytes(foreign)
        done = run_producer("run", source, out, "--window", "500", redis_url=redis_url)
        assert (done.returncode, "did not write" in done.stderr) == (2, True), done.stderr
        assert out.read_bytes() == foreign


def test_what_a_kill_left_half_written_is_cut_off(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    source, out = batch_file(tmp_path / "in.jsonl", 1200), tmp_path / "out.jsonl"
    stopped_after_one_window(redis_url, store, source, out)
    run_all(store)
    # Given what is written before the journal is: the lines of the next window, not to their end
    name = json.loads(journal_of(out).read_text())["name"]
    window = run_producer("results", f"{name}.1", redis_url=redis_url).stdout
    kept = out.read_text()
    for beginning in (window[:4], window[:300], window[:1000], window):
        out.write_text(kept + beginning)
        looked = run_producer("run", source, out, "--set", "top_p=1", redis_url=redis_url)
        assert (looked.returncode, "options differ" in looked.stderr) == (2, True), looked.stderr
        assert out.read_text() == kept
    status, told = served(redis_url, store, source, out, "--window", "500")
    assert status == 0, told
    assert custom_ids(out) == [f"r{n}" for n in range(1200)]


@pytest.mark.parametrize("harm", [Path.unlink, shorten])
def test_an_output_that_is_taken_away_meanwhile_ends_the_run(
    redis_url: str, store: BatchStore, tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    source, out = batch_file(tmp_path / "in.jsonl", 1200), tmp_path / "out.jsonl"
    with running(redis_url, source, out, "--window", "500") as process:
        eventually(lambda: len(windows(store)) == 2, 20)
        lessee = Lessee(client_of(store))
        finish(lessee, lessee.pop(500))
        eventually(lambda: done_windows(out) == 1, 20)
        harm(out)
        run_all(store)
        assert process.wait(30) == 2
        assert process.stderr is not None
        told = process.stderr.read()
    assert "was changed" in told
    assert not out.exists() or b"\0" not in out.read_bytes()


def test_an_interruption_leaves_whole_windows_only(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    source, out = batch_file(tmp_path / "in.jsonl", 1200), tmp_path / "out.jsonl"
    with running(redis_url, source, out, "--window", "500") as process:
        eventually(lambda: len(windows(store)) == 2, 20)
        lessee = Lessee(client_of(store))
        finish(lessee, lessee.pop(700))  # one window and a part of the next
        eventually(lambda: done_windows(out) == 1, 20)
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=20)
    assert process.returncode == 143
    assert told.endswith("interrupted; the same command goes on where it stopped\n")
    assert custom_ids(out) == [f"r{n}" for n in range(500)]


def test_a_run_ends_when_its_table_is_there(
    redis_url: str, store: BatchStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = batch_file(tmp_path / "in.jsonl", 20), tmp_path / "out.parquet"
    write, ended = Export.write, list[bool]()

    def interrupted(export: Export, *_: object) -> None:
        ended.append(store.batch(run_of(store)).finished)
        raise KeyboardInterrupt

    def watched(export: Export, *given: Any) -> None:
        write(export, *given)
        ended.append(store.batch(run_of(store)).finished)

    def run() -> int:
        words = ["run", str(source), str(out)]
        return CliRunner(env={"WARMQ_REDIS_URL": redis_url}).invoke(cli, words).exit_code

    with simulated(redis_url, tmp_path / "worker.log"):
        monkeypatch.setattr(Export, "write", interrupted)
        assert run() != 0
        assert not store.batch(run_of(store)).finished
        monkeypatch.setattr(Export, "write", watched)
        assert run() == 0
    assert ended == [False, False]
    assert store.batch(run_of(store)).finished
