"""`submit --order`: what is queued when, and what an interruption, a race or a cancel leaves."""

from __future__ import annotations

import gzip
import io
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis
from kit.commands.submitting import LIMITS, submit
from kit.commands.support import chat_line, queued, run_all, run_producer, state, write_lines
from kit.protocol.lessee import Lessee, client_of
from kit.verdicts.owners import ownerless

from contract.errors import BatchConflict
from contract.redis.batches import BatchStore
from contract.redis.enqueued import Enqueued
from producer.batch_watch import BatchChanged
from producer.input.files import WriteFailed
from producer.input.reader import RawChunk
from producer.submit import planned
from producer.submit.submission import Submission

PREFIX = Submission("b1", "warmq", 6, order="prefix")
AUTO = Submission("b1", "warmq", 6, order="auto")


def document(number: int, size: int = 600) -> str:
    draw = random.Random(number)
    return "".join(draw.choices("abcdefgh ", k=size))


def by_question(path: Path, documents: int = 6, questions: int = 3) -> Path:
    """Write documents × questions, all first questions first: `d<document>q<question>`."""
    return write_lines(path, (
        chat_line(f"d{d}q{q}", f"{document(d)}\n\nquestion {q}")
        for q in range(questions) for d in range(documents)
    ))  # fmt: skip


def names(store: BatchStore) -> list[str]:
    return [message["headers"]["warmq"]["custom_id"] for message in queued(store)]


def grouped(documents: int = 6, questions: int = 3) -> list[str]:
    return [f"d{d}q{q}" for d in range(documents) for q in range(questions)]


class Killed(Exception):
    """Ends a submit where a process would have been killed."""


def killed_after(count: int) -> Callable[[Iterator[RawChunk]], Iterator[RawChunk]]:
    def watch(raws: Iterator[RawChunk]) -> Iterator[RawChunk]:
        yield from itertools.islice(raws, count)
        raise Killed

    return watch


class Interrupted(BatchStore):
    """A store that does something else in the place of the n-th ENQUEUE_PLANNED."""

    at = 0
    instead: Callable[[], object] = staticmethod(lambda: None)

    def enqueue_planned(self, *args: Any, **options: Any) -> Enqueued:
        self.at -= 1
        if self.at == -1:
            self.instead()
        return super().enqueue_planned(*args, **options)


def interrupted(store: BatchStore, at: int, instead: Callable[[], object]) -> Interrupted:
    found = Interrupted(client_of(store), ttl_ms=60_000)
    found.at, found.instead = at, instead
    return found


def kill() -> None:
    raise Killed


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let both passes go in chunks of four requests."""
    monkeypatch.setattr("producer.input.reader.CHUNK_LINES", 4)
    monkeypatch.setattr(planned, "CHUNK_LINES", 4)


def test_lines_with_a_common_beginning_are_queued_together_in_order_of_their_first(
    store: BatchStore, tmp_path: Path
) -> None:
    submit(store, by_question(tmp_path / "in.jsonl"), PREFIX)
    assert names(store) == grouped()
    batch = state(store, "b1")
    assert batch.sealed
    assert (batch.number("total"), batch.number("valid"), batch.number("planned")) == (18, 18, 18)


def test_results_come_in_the_order_of_the_file(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    file, out = by_question(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    done = run_producer(
        "submit", file, "--order", "prefix", "--batch-id", "b1", redis_url=redis_url
    )
    assert done.returncode == 0, done.stderr
    assert "b1: order: prefix, 6 groups of lines that share about 1" in done.stderr
    assert names(store) == grouped()
    run_all(store)
    done = run_producer("results", "b1", "-o", out, redis_url=redis_url)
    assert done.returncode == 0, done.stderr
    found = [orjson.loads(line)["custom_id"] for line in out.read_bytes().splitlines()]
    assert found == [f"d{d}q{q}" for q in range(3) for d in range(6)]
    assert not ownerless(client_of(store))


def test_a_file_without_order_is_submitted_as_older_versions_did(
    store: BatchStore, tmp_path: Path
) -> None:
    submit(store, by_question(tmp_path / "in.jsonl"))
    batch = state(store, "b1")
    assert not batch.planned
    assert "order" not in batch.fields["options"]
    assert names(store) == [f"d{d}q{q}" for q in range(3) for d in range(6)]


def test_auto_leaves_a_file_that_is_in_groups_already(store: BatchStore, tmp_path: Path) -> None:
    lines = (chat_line(f"d{d}q{q}", f"{document(d)}\n\nquestion {q}")
             for d in range(6) for q in range(3))  # fmt: skip
    summary = submit(store, write_lines(tmp_path / "in.jsonl", lines), AUTO)
    assert summary.choice is not None and not summary.choice.in_groups
    assert state(store, "b1").fields["plan"] == "input"
    assert names(store) == grouped()


def test_auto_puts_a_file_in_groups_whose_documents_do_not_fit_the_cache(
    store: BatchStore, tmp_path: Path, redis_client: redis.Redis
) -> None:
    seconds, _ = redis_client.time()
    announcement = {"queue": "warmq", "state": "ready", "prefix_caching": True, "kv_tokens": 400}
    redis_client.hset(
        "warmq:workers", "w1", b"%d\0" % (1000 * seconds) + orjson.dumps(announcement)
    )
    submit(store, by_question(tmp_path / "in.jsonl"), AUTO)
    assert names(store) == grouped()


def test_auto_leaves_what_fits_the_cache(store: BatchStore, tmp_path: Path) -> None:
    submit(store, by_question(tmp_path / "in.jsonl"), AUTO)
    assert names(store) == [f"d{d}q{q}" for q in range(3) for d in range(6)]


def test_auto_leaves_everything_where_workers_cache_no_prefixes(
    store: BatchStore, tmp_path: Path, redis_client: redis.Redis
) -> None:
    seconds, _ = redis_client.time()
    announcement = {"queue": "warmq", "state": "ready", "prefix_caching": False}
    redis_client.hset(
        "warmq:workers", "w1", b"%d\0" % (1000 * seconds) + orjson.dumps(announcement)
    )
    submit(store, by_question(tmp_path / "in.jsonl", 40, 3), AUTO)
    assert state(store, "b1").fields["plan"] == "input"


@pytest.mark.usefixtures("small_chunks")
def test_nothing_is_queued_before_the_whole_file_was_read(
    store: BatchStore, tmp_path: Path
) -> None:
    file = by_question(tmp_path / "in.jsonl")
    with pytest.raises(Killed):
        submit(store, file, PREFIX, watch=killed_after(3))
    assert names(store) == []
    batch = state(store, "b1")
    assert not batch.sealed
    assert batch.number("total") == batch.number("announced") >= 8
    submit(store, file, PREFIX)
    assert names(store) == grouped()


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("at", range(5))
def test_a_submit_killed_while_it_queues_goes_on_where_it_stopped(
    store: BatchStore, tmp_path: Path, at: int
) -> None:
    file = by_question(tmp_path / "in.jsonl")
    with pytest.raises(Killed):
        submit(interrupted(store, at, kill), file, PREFIX)
    assert names(store) == grouped()[: 4 * at]
    assert not state(store, "b1").sealed
    assert not state(store, "b1").finished
    summary = submit(store, file, PREFIX)
    assert names(store) == grouped()
    assert (summary.found, summary.queued) == (18, 18 - 4 * at)
    assert state(store, "b1").sealed


@pytest.mark.usefixtures("small_chunks")
def test_what_is_answered_before_all_is_queued_does_not_complete_the_batch(
    store: BatchStore, tmp_path: Path
) -> None:
    file = by_question(tmp_path / "in.jsonl")
    answered: list[int] = []
    slow = interrupted(store, 3, lambda: answered.append(run_all(store)))
    submit(slow, file, PREFIX)
    assert answered == [12]
    assert not state(store, "b1").finished
    assert run_all(store) == 6
    assert state(store, "b1").status == "completed"


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("at", [0, 2, 4])
def test_two_submits_at_once_queue_every_request_once(
    store: BatchStore, tmp_path: Path, at: int
) -> None:
    file = by_question(tmp_path / "in.jsonl")
    summary = submit(interrupted(store, at, lambda: submit(store, file, PREFIX)), file, PREFIX)
    assert names(store) == grouped()
    assert summary.batch.sealed


@pytest.mark.usefixtures("small_chunks")
def test_a_repeated_script_whose_reply_was_lost_queues_nothing_twice(
    store: BatchStore, tmp_path: Path
) -> None:
    file = by_question(tmp_path / "in.jsonl")

    class Twice(BatchStore):
        def enqueue_planned(self, *args: Any, **options: Any) -> Enqueued:
            super().enqueue_planned(*args, **options)
            return super().enqueue_planned(*args, **options)

    submit(Twice(client_of(store), ttl_ms=60_000), file, PREFIX)
    assert names(store) == grouped()


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("at", [0, 2])
def test_a_batch_cancelled_while_it_is_queued_is_cancelled_whole_and_can_be_retried_whole(
    store: BatchStore, tmp_path: Path, at: int
) -> None:
    file = by_question(tmp_path / "in.jsonl")
    stopping = interrupted(store, at, lambda: store.cancel(state(store, "b1")))
    with pytest.raises(BatchConflict, match="closed before all its requests were queued"):
        submit(stopping, file, PREFIX)
    batch = state(store, "b1")
    assert (batch.status, batch.number("cancelled")) == ("cancelled", 18)
    # A retry opens it for the messages that are missing, and the same submit brings them
    assert store.retry(batch, ["cancelled"]) == 18
    assert state(store, "b1").status == "validating"
    run_all(store)
    assert not state(store, "b1").finished
    submit(store, file, PREFIX)
    run_all(store)
    assert state(store, "b1").status == "completed"
    assert state(store, "b1").number("completed") == 18


@pytest.mark.usefixtures("small_chunks")
def test_a_batch_cancelled_before_its_file_was_read_is_cancelled_as_far_as_it_was(
    store: BatchStore, tmp_path: Path
) -> None:
    file = by_question(tmp_path / "in.jsonl")
    with pytest.raises(Killed):
        submit(store, file, PREFIX, watch=killed_after(3))
    store.cancel(state(store, "b1"))
    batch = state(store, "b1")
    assert batch.status == "cancelled"
    assert batch.number("cancelled") == batch.number("total")
    with pytest.raises(BatchConflict, match="was closed before line"):
        submit(store, file, PREFIX)


@pytest.mark.usefixtures("small_chunks")
def test_a_batch_deleted_while_it_is_queued_is_gone_with_all_it_had(
    store: BatchStore, worker: Lessee, tmp_path: Path
) -> None:
    file = by_question(tmp_path / "in.jsonl")
    with pytest.raises(BatchChanged, match="was deleted while it was submitted"):
        submit(interrupted(store, 2, lambda: store.delete("b1", force=True)), file, PREFIX)
    assert store.batch("b1") is None
    assert worker.pop() == []  # what was queued of it is dropped
    assert not ownerless(client_of(store))


@pytest.mark.usefixtures("small_chunks")
def test_a_submit_waits_where_redis_is_full_and_says_so(store: BatchStore, tmp_path: Path) -> None:
    file, told = by_question(tmp_path / "in.jsonl"), []
    few = LIMITS.model_copy(update={"high_water_requests": 4})

    def report(summary: Any) -> None:
        if summary.waiting:
            told.append((summary.pushed, summary.waiting))
            run_all(store)

    submit(store, file, PREFIX, report, few)
    assert [pushed for pushed, _ in told] == [4, 8, 12, 16]
    assert told[0][1] == "4 requests wait in the queue"
    run_all(store)
    assert state(store, "b1").status == "completed"


def test_bad_lines_and_repeated_ids_are_errors_of_their_own_and_the_others_are_in_order(
    store: BatchStore, tmp_path: Path
) -> None:
    good = [
        orjson.loads(line) for line in by_question(tmp_path / "in.jsonl").read_bytes().splitlines()
    ]
    lines: list[dict[str, Any] | bytes] = [*good[:4], b"{", good[0], *good[4:], b'{"messages": 1}']
    submit(store, write_lines(tmp_path / "bad.jsonl", lines), PREFIX)
    assert names(store) == grouped()
    batch = state(store, "b1")
    assert (batch.number("total"), batch.number("valid"), batch.number("failed")) == (21, 18, 3)
    run_all(store)
    assert state(store, "b1").finished


def test_a_file_of_bad_lines_alone_ends_as_failed(store: BatchStore, tmp_path: Path) -> None:
    submit(store, write_lines(tmp_path / "in.jsonl", [b"{", b"["]), PREFIX)
    assert state(store, "b1").status == "failed"


def test_compressed_files_are_planned_too(store: BatchStore, tmp_path: Path) -> None:
    packed = tmp_path / "in.jsonl.gz"
    packed.write_bytes(gzip.compress(by_question(tmp_path / "in.jsonl").read_bytes()))
    submit(store, packed, PREFIX)
    assert names(store) == grouped()


def test_embeddings_keep_the_order_of_the_file(store: BatchStore, tmp_path: Path) -> None:
    lines: list[dict[str, Any] | bytes] = [
        {"custom_id": f"e{n}", "method": "POST", "url": "/v1/embeddings",
         "body": {"input": document(n % 2)}} for n in range(6)
    ]  # fmt: skip
    submit(store, write_lines(tmp_path / "in.jsonl", lines), PREFIX)
    assert names(store) == [f"e{n}" for n in range(6)]


@pytest.mark.usefixtures("small_chunks")
def test_a_batch_that_another_version_ordered_otherwise_is_not_gone_on_with(
    store: BatchStore, tmp_path: Path, redis_client: redis.Redis
) -> None:
    file = by_question(tmp_path / "in.jsonl")
    with pytest.raises(Killed):
        submit(interrupted(store, 2, kill), file, PREFIX)
    redis_client.hset("warmq:batch:b1", "plan", "prefix 0123456789abcdef")
    with pytest.raises(BatchConflict, match="that this version of warmq does not plan"):
        submit(store, file, PREFIX)
    assert names(store) == grouped()[:8]


def test_a_pipe_is_refused_an_order_and_auto_takes_its_lines_as_they_come(
    redis_url: str, store: BatchStore, tmp_path: Path
) -> None:
    text = by_question(tmp_path / "in.jsonl").read_text()
    done = run_producer("submit", "-", "--order", "prefix", redis_url=redis_url, stdin=text)
    assert done.returncode == 2
    assert "--order prefix: - is a pipe" in done.stderr
    assert "save it as a file" in done.stderr
    assert store.batches() == []
    done = run_producer("submit", "-", "--order", "auto", redis_url=redis_url, stdin=text)
    assert done.returncode == 0, done.stderr
    assert "order: input; - is a pipe" in done.stderr
    assert names(store) == [f"d{d}q{q}" for q in range(3) for d in range(6)]


def test_a_full_disk_is_an_error_that_names_the_folder_and_tmpdir(
    store: BatchStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = io.FileIO("/dev/full", "r+")
    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: full)
    with pytest.raises(WriteFailed, match="TMPDIR"):
        submit(store, by_question(tmp_path / "in.jsonl"), PREFIX)
    assert not state(store, "b1").sealed
