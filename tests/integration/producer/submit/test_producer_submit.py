"""Submitting, interrupted and repeated: every request is queued exactly once."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from kit.commands.submitting import assert_queued_once, submit
from kit.commands.support import (
    TTL_MS,
    batch_file,
    chat_line,
    producer_command,
    producer_env,
    queued,
    run_all,
    run_producer,
    state,
    write_lines,
)
from kit.protocol.lessee import client_of

from contract import naming
from contract.errors import BatchConflict, StoreUnavailable
from contract.redis.batches import BatchStore
from contract.redis.enqueued import Enqueued
from demo.stack import eventually
from producer.batch_watch import BatchChanged
from producer.cli.show import batch_json
from producer.input.reader import CHUNK_LINES, InputUnreadable, RawChunk
from producer.submit.submission import Submission


def test_messages_are_what_celery_would_write(store: BatchStore, tmp_path: Path):
    line = {"custom_id": "a", "prompt": "Hi é", "max_tokens": 5, "temperature": 0.5}
    submission = Submission("b1", "warmq.tiny", 3, "tiny", {"max_tokens": 7})

    submit(store, write_lines(tmp_path / "in", [line]), submission)

    raw = client_of(store).lindex(naming.turn_list("warmq.tiny", 3, "default", "b1"), 0)
    message = orjson.loads(raw)
    assert orjson.loads(message["body"])[0] == [
        {"prompt": "Hi é", "max_tokens": 7, "temperature": 0.5}
    ]
    assert message["headers"]["id"] == naming.request_id("b1", "a")
    assert message["headers"]["warmq"]["url"] == "/v1/completions"
    assert message["headers"]["warmq"]["line"] == 1
    assert message["properties"]["priority"] == 3
    batch = batch_json(state(store, "b1"))
    assert (batch["model"], batch["queue"]) == ("tiny", "warmq.tiny")


def test_the_batch_id_is_printed_before_the_first_line_is_read(redis_url: str, store: BatchStore):
    with subprocess.Popen(
        producer_command("submit", "-"), env=producer_env(redis_url),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdin and process.stdout
        batch_id = process.stdout.readline().strip()  # nothing was written to stdin yet
        process.stdin.write('{"prompt": "x"}\n{"prompt": "y", "max_tokens": 8}\n')
        _, told = process.communicate()
    assert process.returncode == 0
    assert batch_id.startswith("batch_")
    assert state(store, batch_id).number("total") == 2
    assert "lines without max_tokens: 1; they get the worker's default" in told


def test_a_repeated_submit_changes_nothing(store: BatchStore, tmp_path: Path):
    path = batch_file(tmp_path / "in", 1700)
    first, again = submit(store, path), submit(store, path)
    assert_queued_once(store, 1700)
    assert (first.queued, first.found) == (1700, 0)
    assert (again.queued, again.found) == (0, 1700)


def test_a_repeated_submit_of_a_finished_batch_runs_nothing_again(
    store: BatchStore, tmp_path: Path
):
    path = batch_file(tmp_path / "in", 700)
    submit(store, path)
    run_all(store)

    again = submit(store, path)

    assert again.batch.status == "completed"
    assert queued(store) == []


@pytest.mark.parametrize("after", [1, CHUNK_LINES, 3 * CHUNK_LINES, 11 * CHUNK_LINES])
def test_a_killed_submit_is_completed_by_the_same_command(
    redis_url: str, store: BatchStore, tmp_path: Path, after: int
):
    path = batch_file(tmp_path / "in", 6000)
    command = producer_command("submit", path, "--batch-id", "b1")

    def cursor() -> int:
        batch = store.batch("b1")
        return batch.number("cursor") if batch else 0

    with subprocess.Popen(
        command, env=producer_env(redis_url), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        eventually(lambda: cursor() >= after, 30, every_s=0.0005)
        process.kill()

    done = run_producer("submit", path, "--batch-id", "b1", redis_url=redis_url)

    assert done.returncode == 0, done.stderr
    assert_queued_once(store, 6000)


def test_a_submit_killed_between_chunks_is_open_until_it_is_resumed(
    redis_url: str, store: BatchStore, tmp_path: Path
):
    path = batch_file(tmp_path / "in", 1200)
    with subprocess.Popen(
        producer_command("submit", "-", "--batch-id", "b1"), env=producer_env(redis_url),
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        assert process.stdin
        lines = path.read_bytes().splitlines(keepends=True)
        process.stdin.write(b"".join(lines[:1001]))
        process.stdin.flush()
        eventually(lambda: (batch := store.batch("b1")) and batch.number("cursor") == 1000, 30)
        process.send_signal(signal.SIGKILL)
    open_batch = batch_json(state(store, "b1"))
    assert (open_batch["status"], open_batch["lines_read"]) == ("validating", 1000)

    done = run_producer("submit", path, "--batch-id", "b1", redis_url=redis_url)

    assert done.returncode == 0
    assert "200 of them now" in done.stderr
    assert_queued_once(store, 1200)


class BrokenStore(BatchStore):
    """Fails the nth ENQUEUE, before or after Redis has done it."""

    def __init__(self, whole: BatchStore, fail_at: int, *, done: bool) -> None:
        super().__init__(client_of(whole), ttl_ms=TTL_MS)
        self._left, self._done = fail_at, done

    def enqueue(self, *args: Any, **kwargs: Any) -> Enqueued:
        self._left -= 1
        if self._left == 0:
            if self._done:
                super().enqueue(*args, **kwargs)
            raise StoreUnavailable("Redis: connection lost")
        return super().enqueue(*args, **kwargs)


@pytest.mark.parametrize("fail_at", [1, 2, 4])
@pytest.mark.parametrize("done", [False, True], ids=["request lost", "reply lost"])
def test_a_submit_that_lost_redis_is_resumed(
    store: BatchStore, tmp_path: Path, fail_at: int, done: bool
):
    path = batch_file(tmp_path / "in", 1700)
    with pytest.raises(StoreUnavailable):
        submit(BrokenStore(store, fail_at, done=done), path)
    assert not state(store, "b1").sealed

    submit(store, path)

    assert_queued_once(store, 1700)


class StutteringStore(BatchStore):
    """Sends every ENQUEUE twice, as a client does that has lost the reply."""

    def enqueue(self, *args: Any, **kwargs: Any) -> Enqueued:
        super().enqueue(*args, **kwargs)
        return super().enqueue(*args, **kwargs)


def test_an_enqueue_repeated_after_a_lost_reply_queues_nothing_twice(
    store: BatchStore, tmp_path: Path
):
    submit(StutteringStore(client_of(store), ttl_ms=TTL_MS), batch_file(tmp_path / "in", 1700))
    assert_queued_once(store, 1700)


def test_another_submit_of_the_same_batch_may_overtake(store: BatchStore, tmp_path: Path):
    path = batch_file(tmp_path / "in", 2300)

    def overtaken(raw_chunks: Iterator[RawChunk]) -> Iterator[RawChunk]:
        for chunk in raw_chunks:
            if chunk.ordinal == 2:
                submit(store, path)  # a second producer does it all meanwhile
            yield chunk

    submit(store, path, watch=overtaken)

    assert_queued_once(store, 2300)


def test_concurrent_submits_of_the_same_batch_queue_it_once(
    redis_url: str, store: BatchStore, tmp_path: Path
):
    path = batch_file(tmp_path / "in", 6000)
    command = producer_command("submit", path, "--batch-id", "b1")
    processes = [
        subprocess.Popen(command, env=producer_env(redis_url), stdout=subprocess.DEVNULL)
        for _ in range(3)
    ]
    assert [process.wait(50) for process in processes] == [0, 0, 0]
    assert_queued_once(store, 6000)


def changed(path: Path, line: int) -> Path:
    """Return a copy of a file with one line (from 1) changed."""
    lines = path.read_bytes().splitlines(keepends=True)
    lines[line - 1] = orjson.dumps(chat_line(f"r{line - 1}", "something else")) + b"\n"
    path.with_name("changed").write_bytes(b"".join(lines))
    return path.with_name("changed")


@pytest.mark.parametrize(
    ("line", "where"), [(1, "1 to 500"), (777, "501 to 1000"), (1700, "1501 to 1700")]
)
def test_a_different_file_is_refused_at_the_first_differing_chunk(
    redis_url: str, store: BatchStore, tmp_path: Path, line: int, where: str
):
    path = batch_file(tmp_path / "in", 1700)
    submit(store, path)

    done = run_producer("submit", changed(path, line), "--batch-id", "b1", redis_url=redis_url)

    assert done.returncode == 2
    assert f"differs within lines {where}; use another --batch-id" in done.stderr
    assert_queued_once(store, 1700)


def test_a_different_file_is_refused_while_the_batch_is_open(store: BatchStore, tmp_path: Path):
    path = batch_file(tmp_path / "in", 1700)
    with pytest.raises(StoreUnavailable):
        submit(BrokenStore(store, 3, done=False), path)
    with pytest.raises(BatchConflict, match="within lines 501 to 1000"):
        submit(store, changed(path, 600))
    submit(store, path)
    assert_queued_once(store, 1700)


def test_a_differing_producer_that_was_overtaken_is_refused(store: BatchStore, tmp_path: Path):
    path = batch_file(tmp_path / "in", 1700)

    def overtaken(raw_chunks: Iterator[RawChunk]) -> Iterator[RawChunk]:
        for chunk in raw_chunks:
            if chunk.ordinal == 1:
                submit(store, path)
            yield chunk

    with pytest.raises(BatchConflict, match="within lines 1001 to 1500"):
        submit(store, changed(path, 1200), watch=overtaken)
    assert_queued_once(store, 1700)


@pytest.mark.parametrize("count", [1400, 1000])
def test_a_shorter_file_is_refused(store: BatchStore, tmp_path: Path, count: int):
    submit(store, batch_file(tmp_path / "in", 1700))
    with pytest.raises(BatchConflict, match="different file"):
        submit(store, batch_file(tmp_path / "short", count))
    assert_queued_once(store, 1700)


def test_a_shorter_file_does_not_seal_an_open_batch(store: BatchStore, tmp_path: Path):
    with pytest.raises(StoreUnavailable):
        submit(BrokenStore(store, 4, done=False), batch_file(tmp_path / "in", 1700))
    with pytest.raises(BatchConflict, match="ends at line 1000, the batch has 1500"):
        submit(store, batch_file(tmp_path / "short", 1000))
    assert not state(store, "b1").sealed


def test_a_longer_file_is_refused(store: BatchStore, tmp_path: Path):
    submit(store, batch_file(tmp_path / "in", 1000))
    with pytest.raises(BatchConflict, match="closed before line 1001"):
        submit(store, batch_file(tmp_path / "long", 1700))
    assert_queued_once(store, 1000)


@pytest.mark.parametrize(
    "options",
    [("--priority", "3"), ("--model", "other"), ("--set", "max_tokens=9")],
    ids=["priority", "model", "set"],
)
def test_other_options_under_the_same_id_are_refused(
    redis_url: str, store: BatchStore, tmp_path: Path, options: tuple[str, str]
):
    path = batch_file(tmp_path / "in", 10)
    submit(store, path)

    done = run_producer("submit", path, "--batch-id", "b1", *options, redis_url=redis_url)

    assert done.returncode == 2
    assert "was submitted with other options" in done.stderr
    assert_queued_once(store, 10)


def test_a_cancelled_batch_takes_no_more_lines(store: BatchStore, tmp_path: Path):
    path = batch_file(tmp_path / "in", 1700)

    def cancelled(raw_chunks: Iterator[RawChunk]) -> Iterator[RawChunk]:
        for chunk in raw_chunks:
            if chunk.ordinal == 2:
                eventually(lambda: state(store, "b1").number("cursor") >= 500)
                store.cancel(state(store, "b1"))
            yield chunk

    with pytest.raises(BatchConflict, match=r"was closed before line \d+ \(cancelled"):
        submit(store, path, watch=cancelled)
    batch = state(store, "b1")
    assert batch.status == "cancelled"
    assert batch.number("cancelled") == batch.number("total")


def test_a_batch_deleted_while_it_is_submitted_leaves_no_ghost(store: BatchStore, tmp_path: Path):
    def deleted(raw_chunks: Iterator[RawChunk]) -> Iterator[RawChunk]:
        for chunk in raw_chunks:
            if chunk.ordinal == 2:
                store.cancel(state(store, "b1"))
                assert store.delete("b1")
            yield chunk

    # By which step it met
    with pytest.raises((BatchConflict, BatchChanged), match=r"deleted|closed"):
        submit(store, batch_file(tmp_path / "in", 1700), watch=deleted)
    assert store.batch("b1") is None
    assert store.batches() == []


def test_damaged_input_leaves_a_batch_that_the_mended_file_completes(
    store: BatchStore, tmp_path: Path
):
    path = batch_file(tmp_path / "in", 1700)

    def damaged(raw_chunks: Iterator[RawChunk]) -> Iterator[RawChunk]:
        for chunk in raw_chunks:
            if chunk.ordinal == 2:
                raise InputUnreadable("after line 1000: compressed data ends")
            yield chunk

    with pytest.raises(InputUnreadable):
        submit(store, path, watch=damaged)
    submit(store, path)
    assert_queued_once(store, 1700)


@pytest.mark.parametrize(
    ("lines", "where"),
    [
        (1600, "this one ends at line 1600, the batch has 1700"),
        (200, "this one ends at line 200, the batch has 1700"),
        (1500, "this one ends at line 1500, the batch has 1700"),
        (1701, "this one has more lines than the batch, which ends at line 1700"),
        (2300, "this one has more lines than the batch, which ends at line 1700"),
    ],
)
def test_a_shorter_or_longer_file_is_said_to_be_one(
    store: BatchStore, tmp_path: Path, lines: int, where: str
):
    submit(store, batch_file(tmp_path / "in", 1700))
    with pytest.raises(BatchConflict, match=where):
        submit(store, batch_file(tmp_path / "other", lines))
    assert_queued_once(store, 1700)
