"""Disks that get full: a limit on the size of files makes every write beyond it fail for real."""

from __future__ import annotations

import resource
import subprocess
from pathlib import Path

import pytest
from kit.commands.runs import custom_ids, journal_of, running, served
from kit.commands.support import (
    batch_file,
    chat_line,
    finish,
    producer_command,
    producer_env,
    run_all,
    run_producer,
    state,
    write_lines,
)
from kit.protocol.lessee import Lessee, client_of, submit_batch

from contract.errors import RequestFailed
from contract.redis.batches import BatchStore
from demo.stack import eventually

pytestmark = pytest.mark.timeout(120)
FULL = Path("/dev/full")


def on_a_disk_of(
    size: int, *args: str | Path, redis_url: str, stdout: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command where no file may become larger than `size` bytes."""
    with (stdout or Path("/dev/null")).open("wb") as out:
        return subprocess.run(
            ["prlimit", f"--fsize={size}", *producer_command(*args)],
            env=producer_env(redis_url), stdout=out, stderr=subprocess.PIPE,
            text=True, timeout=50, check=False,
        )  # fmt: skip


def assert_told(status: int | None, told: str, *words: str) -> None:
    assert status == 2, told
    assert "Traceback" not in told
    assert "Exception ignored" not in told
    for word in words:
        assert word in told


def answered(store: BatchStore, count: int, failed: int = 0) -> None:
    """Leave a finished batch b1 of so many results, the first of them failed."""
    submit_batch(store, count)
    lessee = Lessee(client_of(store))
    leases = lessee.pop(count)
    finish(lessee, leases[:failed], RequestFailed("broken"))
    finish(lessee, leases[failed:])


@pytest.mark.parametrize("size", [100, 20_000])
def test_results_on_a_full_disk_leave_the_folder_as_it_was(
    redis_url: str, store: BatchStore, tmp_path: Path, size: int
) -> None:
    answered(store, 200, failed=3)
    out = tmp_path / "out.jsonl"
    out.write_text("an earlier collection\n")
    done = on_a_disk_of(size, "results", "b1", "-o", out, "--force", redis_url=redis_url)
    assert_told(done.returncode, done.stderr, "cannot write", "File too large", "starts again")
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
    assert out.read_text() == "an earlier collection\n"
    collected = run_producer("results", "b1", "-o", out, "--force", redis_url=redis_url)
    assert collected.returncode == 1
    assert len(custom_ids(out)) == 197


def test_an_error_file_does_not_appear_where_the_output_has_no_room(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    answered(store, 200, failed=3)
    out, errors = tmp_path / "out.jsonl", tmp_path / "bad.jsonl"
    errors.write_text("an earlier collection\n")
    done = on_a_disk_of(
        20_000, "results", "b1", "-o", out, "--errors", errors, "--force", redis_url=redis_url
    )
    assert_told(done.returncode, done.stderr, "cannot write")
    assert [path.name for path in tmp_path.iterdir()] == ["bad.jsonl"]
    assert errors.read_text() == "an earlier collection\n"


def test_a_submit_whose_output_has_no_room_says_how_to_collect_it(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    source, out = batch_file(tmp_path / "in.jsonl", 3), tmp_path / "out.jsonl"
    with subprocess.Popen(
        ["prlimit", "--fsize=100", *producer_command("submit", source, "-o", out)],
        env=producer_env(redis_url), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        eventually(lambda: run_all(store) == 3, 30)
        name, told = process.communicate(timeout=30)
    assert_told(process.returncode, told, "cannot write", f"producer results {name.strip()}")
    assert not out.exists()
    collected = run_producer("results", name.strip(), "-o", out, redis_url=redis_url)
    assert (collected.returncode, len(custom_ids(out))) == (0, 3)


def test_a_run_on_a_full_disk_keeps_whole_windows_and_goes_on(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    source, out = batch_file(tmp_path / "in.jsonl", 1200), tmp_path / "out.jsonl"
    with running(redis_url, source, out, "--window", "500") as process:
        # Given room for one window and a half
        eventually(lambda: journal_of(out).exists(), 20)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (350_000, 350_000))

        def ended() -> bool:
            run_all(store)
            return process.poll() is not None

        eventually(ended, 60)
        assert process.stderr is not None
        told = process.stderr.read()
    assert_told(process.returncode, told, f"cannot write {out}", "the same command goes on")
    assert custom_ids(out) == [f"r{n}" for n in range(500)]
    status, told = served(redis_url, store, source, out, "--window", "500")
    assert status == 0, told
    assert custom_ids(out) == [f"r{n}" for n in range(1200)]
    assert all(batch.is_run for batch in store.batches())


def test_a_run_whose_error_file_has_no_room_names_that_one(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    lines = [chat_line(f"r{n}", max_tokens=-1) for n in range(500)] + [chat_line("good")]
    source, out = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    done = on_a_disk_of(2_000, "run", source, out, "--window", "500", redis_url=redis_url)
    assert_told(done.returncode, done.stderr, f"cannot write {tmp_path / 'out.errors.jsonl'}")
    status, told = served(redis_url, store, source, out, "--window", "500")
    assert status == 1, told
    assert (len(custom_ids(out)), len(custom_ids(tmp_path / "out.errors.jsonl"))) == (1, 500)


def test_a_run_that_cannot_even_write_its_journal_can_be_started_again(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    source, out = batch_file(tmp_path / "in.jsonl", 3), tmp_path / "out.jsonl"
    done = on_a_disk_of(100, "run", source, out, redis_url=redis_url)
    assert_told(done.returncode, done.stderr, f"cannot write {journal_of(out)}")
    assert all(batch.is_run for batch in store.batches())
    status, told = served(redis_url, store, source, out)
    assert status == 0, told


def test_a_run_whose_journal_finds_no_room_later_loses_and_doubles_nothing(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    # Given a journal that is longer than the output, for it tells the input's long name
    folder = tmp_path / ("x" * 200) / ("y" * 200)
    folder.mkdir(parents=True)
    source, out = batch_file(folder / "in.jsonl", 1), tmp_path / "out.jsonl"
    with running(redis_url, source, out) as process:
        eventually(lambda: journal_of(out).exists(), 20)
        size = journal_of(out).stat().st_size
        # And no room for the two digits that the output's size will have more
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, size))
        eventually(lambda: run_all(store) == 1, 20)
        assert process.stderr is not None
        told = process.stderr.read()
    assert_told(process.wait(), told, f"cannot write {journal_of(out)}")
    status, told = served(redis_url, store, source, out)
    assert status == 0, told
    assert custom_ids(out) == ["r0"]


@pytest.mark.parametrize(
    "command",
    [
        ["results", "b1"],
        ["results", "b1", "-o", "-", "--order", "completion"],
        ["list"],
        ["status", "b1", "--json"],
        ["submit", "FILE"],
        ["submit", "FILE", "--json", "-o", "OUT"],
    ],
    ids=" ".join,
)
def test_a_full_standard_output_is_an_error_in_words(
    redis_url: str, store: BatchStore, tmp_path: Path, command: list[str]
) -> None:
    answered(store, 3)
    names = {"FILE": batch_file(tmp_path / "in.jsonl", 1), "OUT": tmp_path / "out.jsonl"}
    done = on_a_disk_of(
        10**6, *(names.get(word, word) for word in command), redis_url=redis_url, stdout=FULL
    )
    assert_told(done.returncode, done.stderr, "standard output", "No space left on device")


def test_a_full_standard_error_ends_a_command_without_a_traceback(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    answered(store, 3)
    with FULL.open("wb") as full:
        done = subprocess.run(
            producer_command("results", "b1", "-o", tmp_path / "out.jsonl"),
            env=producer_env(redis_url), stderr=full, check=False, timeout=50,
        )  # fmt: skip
    assert done.returncode == 2


@pytest.mark.parametrize("command", ["results b1", "list --json", "dead list", "status b1", "-h"])
def test_a_reader_that_has_seen_enough_ends_the_command_without_a_word(
    redis_url: str, store: BatchStore, command: str
) -> None:
    answered(store, 1000)
    with subprocess.Popen(
        producer_command(*command.split()), env=producer_env(redis_url),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        if command.startswith("results"):
            process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(20) == 0


def test_a_submit_whose_batch_id_nobody_can_read_queues_nothing(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    source = batch_file(tmp_path / "in.jsonl", 3)
    with subprocess.Popen(
        producer_command("submit", source), env=producer_env(redis_url),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert_told(2, process.stderr.read(), "nothing was queued: standard output is closed")
        assert process.wait(20) == 2
    assert all(batch.is_run for batch in store.batches())


def test_a_submit_without_a_standard_output_queues_nothing(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    source = batch_file(tmp_path / "in.jsonl", 3)
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *producer_command("submit", source)],
        env=producer_env(redis_url), stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    assert_told(2, done.stderr, "nothing was queued: standard output is closed")
    assert done.returncode == 2
    assert all(batch.is_run for batch in store.batches())


def test_results_without_a_standard_output_are_refused(redis_url: str, store: BatchStore) -> None:
    submit_batch(store, 2)
    run_all(store)
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *producer_command("results", "b1")],
        env=producer_env(redis_url), stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    assert_told(2, done.stderr, "standard output is closed, and the results go there")
    assert done.returncode == 2


def test_a_submit_without_a_standard_error_queues_its_file_and_prints_the_id_alone(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    source = batch_file(tmp_path / "in.jsonl", 3)
    words = producer_command("submit", source, "--batch-id", "b1")
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" 2>&-', "sh", *words],
        env=producer_env(redis_url), stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "b1\n")
    assert state(store, "b1").number("total") == 3
