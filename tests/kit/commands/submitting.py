"""Submits in this process, as the command does them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from kit.commands.support import (
    queued,
    state,
)

from contract.redis.batches import BatchStore
from contract.settings import Settings
from producer.input.reader import Input, RawChunk, chunks
from producer.submit.submission import Submission
from producer.submit.submit import Submitter, Summary

LIMITS = Settings(_env_file=None)
ONCE = Submission("b1", "warmq", 6)


def submit(
    store: BatchStore,
    path: Path,
    submission: Submission = ONCE,
    report: Callable[[Summary], None] = lambda summary: None,
    settings: Settings = LIMITS,
    watch: Callable[[Iterator[RawChunk]], Iterator[RawChunk]] = iter,
) -> Summary:
    """Submit a file in this process; `watch` may look at the chunks on their way."""
    source = Input(str(path))
    try:
        planned = submission.order != "input"
        batch = submission.create(store, path.name, planned=planned)
        submitter = Submitter(store, settings, submission, batch, report)
        return submitter.run(watch(chunks(source.lines(), submission.seed, 10**6)))
    finally:
        source.close()


def assert_queued_once(store: BatchStore, count: int, batch_id: str = "b1") -> None:
    """Every line is in the queue, in order and once, and the counters agree."""
    names = [message["headers"]["warmq"]["custom_id"] for message in queued(store)]
    assert names == [f"r{i}" for i in range(count)]
    batch = state(store, batch_id)
    assert batch.sealed
    assert (batch.number("total"), batch.number("valid")) == (count, count)
    assert sum(len(chunk.entries) for chunk in store.index(batch_id)) == count
