"""A run's wrong rows: what names them, and where its requests are when their window is gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kit.commands.runs import done_windows, run_of, running, served, windows
from kit.commands.support import chat_line, finish, run_producer, write_lines
from kit.protocol.lessee import Lessee, client_of

from contract.errors import RequestFailed, RequestRejected
from contract.redis.batches import BatchStore
from demo.stack import eventually

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def command(tmp_path: Path) -> tuple[str | Path, ...]:
    """Return the arguments of a run of a table of which row 2 is wrong."""
    texts = {"id": ["a", "b", "c"], "text": ["x", None, "z"]}
    pq.write_table(pa.table(texts), tmp_path / "in.parquet")
    return (tmp_path / "in.parquet", tmp_path / "out.parquet", "--map", "custom_id=id",
            "--map", "prompt=text")  # fmt: skip


def first_failed(redis_url: str, run: str) -> list[Any]:
    """Return custom_id and line of the first failed requests in `producer status`."""
    shown = orjson.loads(run_producer("status", run, "--json", redis_url=redis_url).stdout)
    first = [one for code in shown["failures"] for one in code["first"]]
    assert all(one["message"] for one in first)
    return [(one["custom_id"], one["line"]) for one in first]


def test_the_wrong_row_of_a_run_is_named_when_its_window_is_gone(
    redis_url: str, store: BatchStore, command: tuple[str | Path, ...]
) -> None:
    status, told = served(redis_url, store, *command)
    assert (status, windows(store)) == (1, [])
    assert "first bad line: row 2, column text: " in told
    # Also later, and in the status, with the place of all errors
    again = run_producer("run", *command, redis_url=redis_url).stderr
    assert "was complete already" in again
    assert "first bad line: row 2, column text: " in again
    run = run_of(store)
    assert first_failed(redis_url, run) == [("b", 2)]
    shown = run_producer("status", run, redis_url=redis_url).stdout
    assert "row 2, column text: " in shown
    assert "error_message" in shown and "ERR" in shown
    # A request is not denied
    asked = run_producer("status", run, "--request", "b", redis_url=redis_url)
    assert asked.returncode == 2
    assert "no request 'b' is in Redis" in asked.stderr and "OUT" in asked.stderr
    # And no retry is advised, because it would change nothing
    refused = run_producer("retry", run, redis_url=redis_url)
    assert (refused.returncode, "--retry" in refused.stderr) == (2, False)
    assert "correct" in refused.stderr
    cut = run_producer("retry", run, "--cut", redis_url=redis_url)
    assert (cut.returncode, "max_tokens" in cut.stderr) == (2, True)


def test_requests_of_other_windows_of_a_run_are_not_denied(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    lines = [chat_line(f"r{n}", **({"colour": 1} if n == 7 else {})) for n in range(1700)]
    source, out = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    lessee = Lessee(client_of(store))
    with running(redis_url, source, out, "--window", "500") as process:
        eventually(lambda: len(windows(store)) == 2, 30)
        finish(lessee, lessee.pop(20))
        # Failures of the window that runs are not those of the lines in OUT
        assert process.stderr is not None
        line = next(one for one in iter(process.stderr.readline, "") if "(1 of 21 failed" in one)
        assert "0 lines done (0 failed), 21 of the next 500 requests have ended (" in line
        finish(lessee, lessee.pop(479))
        eventually(lambda: done_windows(out) == 1 and len(windows(store)) == 2, 30)
        run = run_of(store)
        for name in ("r7", "r3", "r1650"):
            asked = run_producer("status", run, "--request", name, redis_url=redis_url)
            assert asked.returncode == 2
            assert f"no request '{name}' is queued now" in asked.stderr
            assert "OUT" in asked.stderr
        assert first_failed(redis_url, run) == [("r7", 8)]
        refused = run_producer("retry", run, redis_url=redis_url).stderr
        assert "--retry" not in refused


def test_a_retry_keeps_the_first_wrong_lines(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    lines = [chat_line("a"), chat_line("b"), chat_line("wrong", colour=1)]
    command = (write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl")
    lessee = Lessee(client_of(store))
    with running(redis_url, *command) as process:
        finish(lessee, eventually(lambda: lessee.pop(1), 30), RequestFailed("it broke", code="bad"))
        eventually(lambda: (finish(lessee, lessee.pop(9)), process.poll())[1] is not None, 30)
        assert process.stderr is not None
        told = process.stderr.read()
    assert "2 of 3 failed: " in told and "1 bad" in told
    assert "--retry failed runs 1 line again" in told
    run = run_of(store)
    assert sorted(first_failed(redis_url, run)) == [("a", 1), ("wrong", 3)]
    advice = run_producer("retry", run, redis_url=redis_url).stderr
    assert "--retry failed runs" in advice and "when it is complete" not in advice
    status, told = served(redis_url, store, *command, "--retry", "failed")
    assert (status, "2 results, 1 failed" in told) == (1, True)
    assert "1 of 3 failed: " in told and "runs 1 line again" not in told
    assert "first bad line: line 3, field body.colour: " in told
    assert first_failed(redis_url, run) == [("wrong", 3)]


def test_only_lines_that_a_retry_can_change_are_counted_for_one(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    lines = [chat_line("a"), chat_line("wrong", colour=1), chat_line("long")]
    command = (write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl")
    lessee = Lessee(client_of(store))
    too_long = RequestRejected("the prompt is too long", code="context_length_exceeded")
    with running(redis_url, *command) as process:
        finish(lessee, eventually(lambda: lessee.pop(1), 30))
        finish(lessee, lessee.pop(1), too_long)
        _, told = process.communicate(timeout=30)
    wrong = "2 failed lines are wrong themselves (1 unknown_field, 1 context_length_exceeded)"
    assert f"{wrong}: correct them, and run the correction as a new file" in told
    assert "--retry" not in told
    again = run_producer("run", *command, "--retry", "failed", redis_url=redis_url).stderr
    assert "nothing runs again: no line ended as failed, except wrong lines" in again
    assert wrong in run_producer("retry", run_of(store), redis_url=redis_url).stderr
