"""The record of a run in Redis: what lists, the API and the page show, and how a cancel ends it."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from kit.commands.doctor_findings import announce
from kit.commands.runs import custom_ids, done_windows, run_of, running, windows
from kit.commands.support import (
    batch_file,
    chat_line,
    finish,
    producer_command,
    producer_env,
    run_all,
    run_producer,
    write_lines,
)
from kit.protocol.lessee import QUEUE, Lessee, client_of

from contract.errors import RequestFailed
from contract.redis import keys
from contract.redis.batches import BatchStore
from contract.settings import Settings
from demo.stack import eventually
from gateway.batches.api.protocol import Batch, batch_object
from gateway.redis.batch_views import BatchViews
from producer.cli.progress import CANCELLED_RUN
from producer.stalls import StallReads

pytestmark = pytest.mark.timeout(120)
#: Lines of a window, of which a run queues two.
WINDOW = 500


@contextmanager
def two_windows(
    redis_url: str, store: BatchStore, source: Path, out: Path, *args: str
) -> Iterator[subprocess.Popen[str]]:
    """Run a file; Redis has its two first windows."""
    with running(redis_url, source, out, "--window", str(WINDOW), *args) as process:
        eventually(lambda: [b.sealed for b in windows(store)] == [True, True], 30, "two windows")
        yield process


@pytest.fixture
def run(redis_url: str, store: BatchStore, tmp_path: Path) -> str:
    """Return the name of a run that was interrupted after it had queued its two first windows."""
    source = batch_file(tmp_path / "in.jsonl", 3 * WINDOW)
    with two_windows(redis_url, store, source, tmp_path / "out.jsonl"):
        pass
    return run_of(store)


def row(redis_url: str, run: str) -> list[str]:
    """Return the cells of a run in `producer list`."""
    lines = run_producer("list", redis_url=redis_url).stdout.splitlines()
    return next(line.split() for line in lines if line.startswith(run))


def status(redis_url: str, run: str) -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads(
        run_producer("status", run, "--json", redis_url=redis_url).stdout
    )
    return found


def api_batch(store: BatchStore) -> Batch:
    """Return the only batch as the API shows it."""
    page = BatchViews.using(store).page("", limit=10)
    assert page is not None
    found = batch_object(page.batches[0])
    assert found is not None
    return found


def error_codes(store: BatchStore) -> list[str]:
    """Return the codes of the reasons that the API has for the only batch's end."""
    errors = api_batch(store).errors
    return [one.code for one in errors.data] if errors is not None else []


def stderr_of(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    return process.stderr.read()


def errors_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(x) for x in out.with_suffix(".errors.jsonl").read_text().splitlines()]


def test_a_run_is_one_batch_with_the_counts_of_all_its_windows(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    source, out = batch_file(tmp_path / "in.jsonl", 1700), tmp_path / "out.jsonl"
    lessee = Lessee(client_of(store))
    with two_windows(redis_url, store, source, out) as process:
        run = run_of(store)
        (created,) = {row(redis_url, run)[4]}
        leases = lessee.pop(WINDOW)
        finish(lessee, leases[:3], RequestFailed("it broke", code="broken"))
        finish(lessee, leases[3:])
        eventually(lambda: len(windows(store)) == 2 and done_windows(out) == 1, 30)
        finish(lessee, lessee.pop(7))
        # Then the failures of the window that is gone are still counted
        eventually(lambda: row(redis_url, run)[2] == "507/1500+", 30)
        assert row(redis_url, run) == [run, "in_progress", "507/1500+", "3", created]
        shown = status(redis_url, run)
        assert shown["failures"][0]["code"] == "broken"
        assert shown["request_counts"]["failed"] == 3
        assert "507" in run_producer("top", redis_url=redis_url).stdout
        # And programs get one batch
        listed = orjson.loads(run_producer("list", "--json", redis_url=redis_url).stdout)
        assert [one["id"] for one in listed] == [run]
        page = BatchViews.using(store).page("", limit=10)
        assert page is not None
        batch = batch_object(page.batches[0])
        assert batch is not None
        assert (batch.id, batch.status, len(page.batches)) == (run, "in_progress", 1)
        assert (batch.request_counts.completed, batch.request_counts.failed) == (504, 3)
        eventually(lambda: (run_all(store), process.poll())[1] is not None, 60)
    # When the run has ended, its record stays as long as results do
    assert (process.returncode, windows(store)) == (1, [])
    assert row(redis_url, run) == [run, "completed", "1700/1700", "3", created]
    assert status(redis_url, run)["request_counts"]["completed"] == 1697
    assert client_of(store).zscore(keys.RETIRING, run) is not None
    page = BatchViews.using(store).page("", limit=10)
    assert page is not None
    batch = batch_object(page.batches[0], partial=True)
    assert batch is not None
    assert (batch.status, batch.output_file_id) == ("completed", None)
    # And a cancel of it comes too late
    assert run_producer("cancel", run, redis_url=redis_url).returncode == 0
    assert status(redis_url, run)["status"] == "completed"
    results = run_producer("results", run, redis_url=redis_url)
    assert (results.returncode, "OUT" in results.stderr) == (2, True)
    assert run_producer("delete", run, redis_url=redis_url).returncode == 0
    assert list(client_of(store).scan_iter("warmq:batch:*")) == []


def test_requests_of_a_run_wait_for_a_worker_as_those_of_a_batch_do(
    run: str, store: BatchStore
) -> None:
    def waiting() -> int:
        found = StallReads.using(store).stalls(Settings(), [QUEUE], store.batches())
        return sum(one.facts["waiting"] for one in found if one.code == "queue_unserved")

    assert waiting() == 2 * WINDOW
    for window in windows(store):
        store.cancel(window)
    assert waiting() == 0


def test_a_run_whose_windows_have_ended_is_not_completed(
    run: str, redis_url: str, store: BatchStore
) -> None:
    announce(store)
    run_all(store)
    assert row(redis_url, run)[1:4] == ["in_progress", "1000/1000+", "0"]
    told = run_producer("list", redis_url=redis_url).stderr
    assert f"{run}: " in told
    assert "+: " in told
    assert "`producer run`" in run_producer("status", run, redis_url=redis_url).stdout
    with subprocess.Popen(
        producer_command("watch", run), env=producer_env(redis_url), text=True,
        stderr=subprocess.PIPE,
    ) as watch:  # fmt: skip
        assert watch.stderr is not None
        assert "the same command goes on" in watch.stderr.readline()
        watch.kill()


def test_commands_take_the_name_of_a_run_that_list_shows(
    run: str, redis_url: str, store: BatchStore
) -> None:
    assert status(redis_url, run)["request_counts"]["total"] == 2 * WINDOW
    found = run_producer("status", run, "--request", "r7", "--json", redis_url=redis_url)
    assert orjson.loads(found.stdout)["batch_id"] == f"{run}.0"
    none = run_producer("status", run, "--request", "r9999", redis_url=redis_url)
    assert "no request 'r9999'" in none.stderr
    refused = run_producer("retry", run, redis_url=redis_url)
    assert (refused.returncode, "--retry failed,cancelled" in refused.stderr) == (2, True)
    assert run_producer("delete", run, redis_url=redis_url).returncode == 2
    cancelled = run_producer("cancel", run, "--json", redis_url=redis_url)
    assert orjson.loads(cancelled.stdout)["requests"] == 2 * WINDOW
    assert row(redis_url, run)[1:4] == ["cancelled", "0/1000", "0"]
    assert run_producer("delete", run, redis_url=redis_url).returncode == 0
    assert (store.batches(), windows(store)) == ([], [])
    assert run_producer("status", run, redis_url=redis_url).returncode == 2


def test_a_cancel_ends_a_run_and_all_its_rows_are_written(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    lines = [chat_line(f"r{n}", **({"colour": 1} if n == 0 else {})) for n in range(2300)]
    source, out = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    lessee = Lessee(client_of(store))
    with two_windows(redis_url, store, source, out, "--stop-after-failures", "90%") as process:
        run = run_of(store)
        finish(lessee, lessee.pop(600))
        eventually(lambda: done_windows(out) == 1, 30)
        assert run_producer("cancel", run, redis_url=redis_url).returncode == 0
        assert process.wait(30) == 1
        told = stderr_of(process)
    assert told.count(f"{run} was cancelled") == 1
    assert custom_ids(out) == [f"r{n}" for n in range(1, 601)]
    errors = errors_of(out)
    assert [one["custom_id"] for one in errors] == ["r0", *(f"r{n}" for n in range(601, 2300))]
    assert {one["error"]["code"] for one in errors[1:]} == {"cancelled"}
    assert "600 results, 1 failed, 1699 cancelled" in told
    assert row(redis_url, run)[1:4] == ["cancelled", "601/2300", "1"]
    assert windows(store) == []
    again = run_producer("run", source, out, "--stop-after-failures", "90%", redis_url=redis_url)
    assert (again.returncode, "was complete already" in again.stderr) == (1, True)


def test_a_run_that_was_cancelled_while_it_was_away_ends_with_the_same_command(
    run: str, redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    assert run_producer("cancel", run, redis_url=redis_url).returncode == 0
    done = run_producer("run", tmp_path / "in.jsonl", tmp_path / "out.jsonl", redis_url=redis_url)
    # Then nothing ran, which is no wrong input
    assert done.returncode == 1
    assert f"{run} was cancelled" in done.stderr
    assert "0 results, 0 failed, 1500 cancelled" in done.stderr
    # `done` is in all places what has completed or failed
    assert "0 lines done (0 failed), 1500 cancelled" in done.stderr
    assert "1500 lines done" not in done.stderr
    assert [one["custom_id"] for one in errors_of(tmp_path / "out.jsonl")] == [
        f"r{n}" for n in range(1500)
    ]


def test_a_cancel_of_a_run_without_waiting_requests_tells_what_it_did(
    run: str, redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    run_all(store)
    done = run_producer("cancel", run, "--json", redis_url=redis_url)
    assert done.stderr.startswith(f"{run}: cancelled; 0 requests were waiting\n")
    assert CANCELLED_RUN in done.stderr
    assert orjson.loads(done.stdout) == {"id": run, "requests": 0}
    assert status(redis_url, run)["status"] == "cancelled"
    assert CANCELLED_RUN in run_producer("status", run, redis_url=redis_url).stdout
    files = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    run_producer("run", *files, redis_url=redis_url)
    assert CANCELLED_RUN not in run_producer("status", run, redis_url=redis_url).stdout
    again = run_producer("cancel", run, redis_url=redis_url)
    assert again.stderr == f"{run}: 0 requests cancelled: it has ended already (cancelled)\n"


def test_a_run_that_was_cancelled_and_deleted_goes_on(
    run: str, redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    assert run_producer("cancel", run, redis_url=redis_url).returncode == 0
    assert run_producer("delete", run, redis_url=redis_url).returncode == 0
    out = tmp_path / "out.jsonl"
    with running(redis_url, tmp_path / "in.jsonl", out, "--window", str(WINDOW)) as process:
        eventually(lambda: (run_all(store), process.poll())[1] is not None, 60)
    assert (process.returncode, len(custom_ids(out))) == (0, 1500)
    assert row(redis_url, run)[1:4] == ["completed", "1500/1500", "0"]


def test_a_cancelled_run_of_a_table_keeps_its_columns(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    source, out = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_text("id,text,mark\n" + "".join(f"r{n},t{n},m{n}\n" for n in range(1700)))
    options = ("--map", "custom_id=id", "--map", "prompt=text", "--keep", "all")
    with two_windows(redis_url, store, source, out, *options) as process:
        assert run_producer("cancel", run_of(store), redis_url=redis_url).returncode == 0
        assert process.wait(30) == 1, stderr_of(process)
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert [one["mark"] for one in rows] == [f"m{n}" for n in range(1700)]
    assert {one["status"] for one in rows} == {"cancelled"}


def test_a_cancelled_run_of_a_pipe_says_which_rows_it_lacks(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    source, out = batch_file(tmp_path / "in.jsonl", 1700), tmp_path / "out.jsonl"
    with subprocess.Popen(
        producer_command("run", "-", out, "--window", str(WINDOW)), text=True,
        env=producer_env(redis_url), stdin=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(source.read_text())
        process.stdin.close()
        eventually(lambda: [b.sealed for b in windows(store)] == [True, True], 30)
        assert run_producer("cancel", run_of(store), redis_url=redis_url).returncode == 0
        assert process.wait(30) == 1
        assert "was cancelled; the input cannot be read again" in stderr_of(process)


def test_a_stopped_run_says_why_until_it_goes_on(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    source, out = batch_file(tmp_path / "in.jsonl", 1200), tmp_path / "out.jsonl"
    command = (source, out, "--window", str(WINDOW), "--stop-after-failures", "20")
    lessee = Lessee(client_of(store))
    with running(redis_url, *command) as process:
        leases = eventually(lambda: lessee.pop(100), 30)
        finish(lessee, leases[:20], RequestFailed("it broke", code="broken"))
        finish(lessee, leases[20:])
        assert process.wait(30) == 1
    run = run_of(store)
    shown = status(redis_url, run)
    assert ("stopped: 20 of" in shown["reason"], shown["status"]) == (True, "cancelled")
    assert shown["finished_at"] is not None
    # Its input is not read to the end, and all its places agree
    assert row(redis_url, run)[1].startswith("cancel")
    assert row(redis_url, run)[2].endswith("+")
    assert api_batch(store).status == "cancelled"
    assert error_codes(store) == ["too_many_failures"]
    text = run_producer("status", run, redis_url=redis_url).stdout
    assert "`producer run`" in text and "--stop-after-failures" in text
    watched = run_producer("watch", run, redis_url=redis_url)
    assert (watched.returncode, "`producer run`" in watched.stderr) == (1, True)
    assert "producer retry" not in watched.stderr
    with running(redis_url, *command) as process:
        leases = eventually(lambda: lessee.pop(10), 30)
        assert status(redis_url, run)["status"] == "in_progress"
        finish(lessee, leases)
        eventually(lambda: (run_all(store), process.poll())[1] is not None, 60)
    assert process.returncode == 0
    again = status(redis_url, run)
    assert (again["reason"], again["status"]) == (None, "completed")
    assert error_codes(store) == []


def test_a_stopped_run_that_is_cancelled_ends_with_the_same_command(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    source, out = batch_file(tmp_path / "in.jsonl", 1200), tmp_path / "out.jsonl"
    command = (source, out, "--window", str(WINDOW), "--stop-after-failures", "1")
    lessee = Lessee(client_of(store))
    with running(redis_url, *command) as process:
        leases = eventually(lambda: lessee.pop(10), 30)
        finish(lessee, leases, RequestFailed("it broke", code="broken"))
        assert process.wait(30) == 1
    run = run_of(store)
    told = run_producer("cancel", run, redis_url=redis_url)
    assert (told.returncode, "ended already" in told.stderr) == (0, False)
    assert error_codes(store) == []  # its user has cancelled it
    done = run_producer("run", *command, redis_url=redis_url)
    assert (done.returncode, done.stderr.count(f"{run} was cancelled")) == (1, 1)
    assert len(errors_of(out)) == 1200
    assert row(redis_url, run)[1] == "cancelled"


def test_a_watched_run_is_followed_to_its_end(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    source, out = batch_file(tmp_path / "in.jsonl", 1700), tmp_path / "out.jsonl"
    with two_windows(redis_url, store, source, out) as process:
        run = run_of(store)
        with subprocess.Popen(
            producer_command("watch", run), text=True, env=producer_env(redis_url),
            stderr=subprocess.PIPE,
        ) as watch:  # fmt: skip
            eventually(lambda: (run_all(store), process.poll())[1] is not None, 60)
            assert watch.wait(30) == 0
            assert f"{run}: completed, 1700 total, 1700 completed" in stderr_of(watch)


def test_an_interrupted_run_keeps_one_record(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    source, out = batch_file(tmp_path / "in.jsonl", 1700), tmp_path / "out.jsonl"
    lessee = Lessee(client_of(store))
    with two_windows(redis_url, store, source, out) as process:
        finish(lessee, lessee.pop(WINDOW))
        eventually(lambda: done_windows(out) == 1, 30)
        process.send_signal(signal.SIGKILL)
    run = run_of(store)
    with running(redis_url, source, out, "--window", "1000") as process:
        eventually(lambda: (run_all(store), process.poll())[1] is not None, 60)
    assert [batch.id for batch in store.batches()] == [run]
    assert row(redis_url, run)[1:4] == ["completed", "1700/1700", "0"]
