"""`producer try`: a spread of rows runs now, is shown, and leaves nothing behind."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from kit.commands.doctor_findings import announce
from kit.commands.support import (
    chat_line,
    finish,
    producer_command,
    producer_env,
    queued,
    run_all,
    run_producer,
    state,
    write_lines,
)
from kit.protocol.lessee import Lessee, client_of

from contract.errors import RequestFailed
from contract.redis.batches import BatchStore
from demo.stack import eventually

LINES = 1_000
#: Keys that no batch owns.
KEPT = (b"warmq:lease_seq", b"warmq:sweep", b"warmq:workers")


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """1,000 lines, of which every tenth is wrong from the 501st on."""
    wrong = {"temperature": 9}
    return write_lines(
        tmp_path / "in.jsonl",
        (chat_line(f"r{n}", f"question {n}", **(wrong if n % 10 == 0 and n > 500 else {}))
         for n in range(LINES)),
    )  # fmt: skip


@contextmanager
def trying(redis_url: str, *args: str | Path, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": producer_env(redis_url)}
    with subprocess.Popen(producer_command("try", *args), **(given | options)) as process:
        try:
            yield process
        finally:
            process.kill()


def begun(store: BatchStore, rows: int) -> list[dict[str, Any]]:
    """Wait until a trial's rows are in the queue; return their messages."""
    eventually(lambda: len(queued(store)) == rows, 30, "the rows are queued")
    return queued(store)


def left(store: BatchStore) -> list[bytes]:
    """Return the keys that stay in Redis, except the counter of leases and the index of queues."""
    client = client_of(store)
    found: list[bytes] = client.keys("*")
    return [key for key in found if client.ttl(key) == -1 and key not in KEPT]


def test_rows_from_all_over_the_file_are_answered_first_and_then_gone(
    redis_url: str, store: BatchStore, lines: Path
) -> None:
    done = run_producer("submit", lines, "--batch-id", "other", redis_url=redis_url)
    assert done.returncode == 0
    before = len(queued(store))
    with trying(redis_url, lines, "--rows", "5", "--json") as process:
        eventually(lambda: len(queued(store)) > before, 30)
        names = [message["headers"]["warmq"]["batch"] for message in queued(store)]
        run_all(store)
        out, _ = process.communicate(timeout=30)
    # They wait before all others, though they came later
    tried = len(names) - before
    assert 3 <= tried <= 5
    assert all(name.startswith("try_") for name in names[:tried])
    found = orjson.loads(out)
    assert found["rows"][0]["line"] == 1
    assert found["rows"][-1]["line"] > 800
    assert found["rows"][1]["prompt"].startswith("user: question ")
    assert found["rows"][1]["text"] == f"answer to {found['rows'][1]['custom_id']}"
    assert found["request_counts"]["completed"] + found["request_counts"]["failed"] == 5
    # The plan is that of the whole file, by the answers' own tokens: 3 and 2
    assert found["plan"]["request_counts"]["total"] == LINES
    assert found["plan"]["request_counts"]["bad"] == 49
    assert found["plan"]["completion_tokens"]["expected"] == 2 * (LINES - 49)
    assert found["plan"]["prompt_tokens"]["total"] == pytest.approx(3 * (LINES - 49), rel=0.2)
    assert [batch.id for batch in store.batches()] == ["other"]


def test_prompt_and_answer_are_side_by_side_and_failures_have_their_reason(
    redis_url: str, store: BatchStore, lines: Path
) -> None:
    with trying(redis_url, lines, "--rows", "4") as process:
        eventually(lambda: queued(store), 30)
        lessee = Lessee(client_of(store))
        finish(lessee, lessee.pop(1))
        finish(lessee, lessee.pop(1), RequestFailed("the engine said no", code="engine_error"))
        run_all(store)
        out, told = process.communicate(timeout=30)
    assert process.returncode == 1, told
    text = out.decode()
    assert "custom_id" in text.splitlines()[1]
    (row,) = [line for line in text.splitlines() if "answer to r0" in line]
    assert "question 0" in row
    assert "engine_error: the engine said no" in text
    assert "1 engine_error" in text
    assert "bad: line 511, field body.temperature" in text
    assert left(store) == []


def test_wrong_rows_are_shown_with_their_line_and_reason(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    file = tmp_path / "in.csv"
    file.write_text("text,n\nhello,1\n,2\n")
    with trying(redis_url, file, "--map", "prompt=text", "--json") as process:
        eventually(lambda: queued(store), 30)
        run_all(store)
        out, _ = process.communicate(timeout=30)
    good, bad = orjson.loads(out)["rows"]
    assert (good["prompt"], good["text"]) == ("hello", "answer to line-1")
    assert bad["error_code"] == "invalid_request"
    assert "row 2, column text" in bad["error_message"]
    assert process.returncode == 1
    assert left(store) == []


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_cancels_and_removes_it(
    number: signal.Signals, status: int, redis_url: str, store: BatchStore, lines: Path
) -> None:
    with trying(redis_url, lines) as process:
        begun(store, 20 - sum(n % 10 == 0 and n > 500 for n in _tried(store)))
        lessee = Lessee(client_of(store))
        running = lessee.pop(3)
        process.send_signal(number)
        assert process.wait(20) == status
    assert store.batches() == []
    finish(lessee, running)  # their worker has aborted them
    assert left(store) == []


def _tried(store: BatchStore) -> list[int]:
    """Return the numbers of the lines that a trial has, bad ones included."""
    batch = eventually(lambda: next(iter(b for b in store.batches() if b.sealed), None), 30)
    return [int(e[1][1:]) for chunk in store.index(batch.id) for e in chunk.entries]


def test_a_terminal_that_is_closed_cancels_and_removes_it(
    redis_url: str, store: BatchStore, lines: Path
) -> None:
    ours, theirs = pty.openpty()
    command = ["setsid", "--ctty", "--wait", *producer_command("try", lines)]
    with subprocess.Popen(
        command, env=producer_env(redis_url), stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        reader = threading.Thread(target=_drain, args=(ours,), daemon=True)
        _tried(store)
        reader.start()
        os.close(ours)
        process.wait(30)
    assert eventually(lambda: not left(store), 20)


def _drain(file: int) -> None:
    try:
        while os.read(file, 4096):
            pass
    except OSError:
        pass


def test_a_killed_trial_expires_and_keeps_its_results_for_minutes(
    redis_url: str, store: BatchStore, lines: Path
) -> None:
    with trying(redis_url, lines) as process:
        _tried(store)
        process.kill()
        process.wait(20)
    (batch,) = store.batches()
    life_ms = int(batch.fields["deadline"]) - int(batch.created)
    assert life_ms == 3_600_000
    run_all(store)
    assert state(store, batch.id).finished
    lessee = Lessee(client_of(store))
    for last in (0, 1):
        ids = [rid for chunk in store.index(batch.id) for rid in chunk.request_ids(batch.id)]
        assert lessee.run("retire", batch.id, batch.life, 10**9, last, *ids) == 1
    assert 0 < (store.expires_in_s(batch.id) or 0) <= 600


def test_options_of_submit_are_taken_and_those_without_use_are_named(
    redis_url: str, store: BatchStore, lines: Path, tmp_path: Path
) -> None:
    args = ("--set", "max_tokens=7", "-o", tmp_path / "out.jsonl", "--batch-id", "mine", "--wait")
    with trying(redis_url, lines, "--rows", "1", "--priority", "9", *args) as process:
        (message,) = begun(store, 1)
        run_all(store)
        _, told = process.communicate(timeout=30)
    assert orjson.loads(message["body"])[0][0]["max_tokens"] == 7
    assert b"--batch-id, --wait, --output" in told
    assert process.returncode == 0
    assert not (tmp_path / "out.jsonl").exists()
    assert left(store) == []


def test_a_pipe_can_be_tried(redis_url: str, store: BatchStore, lines: Path) -> None:
    with lines.open() as file, trying(redis_url, "-", "--rows", "2", stdin=file) as process:
        begun(store, 2)
        run_all(store)
        assert process.wait(30) == 0


def test_a_file_without_lines_is_told(redis_url: str, store: BatchStore, tmp_path: Path) -> None:
    done = run_producer("try", write_lines(tmp_path / "in.jsonl", []), redis_url=redis_url)
    assert done.returncode == 2
    assert "nothing to try" in done.stderr
    assert left(store) == []


def test_without_a_worker_it_says_at_once_what_it_waits_for_and_what_to_do(
    redis_url: str, store: BatchStore, lines: Path
) -> None:
    with trying(redis_url, lines, "--rows", "2") as process:
        assert process.stderr is not None
        told = next(line for line in process.stderr if b"it waits" in line).decode()
        run_all(store)
        process.communicate(timeout=30)
    assert "no worker serves the queue warmq; requests waiting: 2" in told
    assert "start a worker for it with the other settings of an earlier one (`warmq-worker`" in told


def test_a_worker_that_starts_after_the_command_is_known_at_its_end(
    redis_url: str, store: BatchStore, lines: Path
) -> None:
    with trying(redis_url, lines, "--rows", "2") as process:
        eventually(lambda: queued(store), 30)
        announce(store)
        run_all(store)
        out, _ = process.communicate(timeout=30)
    assert b"no worker of queue" not in out
    assert b"not known: 1 worker, but none has recorded work" in out
