"""`producer run` goes on by itself where a Redis that was away has lost windows of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import orjson
import pytest
from kit.commands.runs import custom_ids, windows
from kit.commands.submitting import LIMITS
from kit.commands.support import TTL_MS, batch_file, queued, run_all
from kit.protocol.lessee import client_of
from kit.redis_servers.lost_writes import ForgetfulStore, Memory

from contract import naming
from contract.batch import Batch
from contract.redis.batches import BatchStore
from producer.batch_watch import BatchChanged, WritesLost
from producer.input.reader import Input
from producer.run.windows import Run
from producer.submit.submission import Submission

LINES = 1700
#: The scripts of a run in windows of 500 lines, from its second to its fourth window.
STEPS = (
    "create 2", "enqueue 2", "seal 2", "delete 1", "create 3", "enqueue 3", "seal 3", "delete 2",
    "create 4",
)  # fmt: skip


class AnsweredStore(ForgetfulStore):
    """Answers what is queued before each look at a batch."""

    def __init__(self, whole: BatchStore, other: BatchStore) -> None:
        super().__init__(whole)
        self._other = other

    def batch(self, batch_id: str) -> Batch | None:
        run_all(self._other)
        return super().batch(batch_id)


@pytest.fixture
def answered(redis_url: str, store: BatchStore) -> Iterator[AnsweredStore]:
    """Return the store of a producer; another one answers, and keeps what Redis has."""
    with closing(BatchStore.open(redis_url, "warmq-producer", ttl_ms=TTL_MS)) as own:
        yield AnsweredStore(own, store)


def run(store: BatchStore, folder: Path, window: int = 500) -> None:
    """Run the file once, or its rest."""
    submission = Submission("run", naming.DEFAULT_QUEUE, 6)
    whole = Run(store, LIMITS, submission, window, lambda done, waiting: None)
    with closing(Input(str(folder / "in.jsonl"))) as source:
        whole.run(source, folder / "out.jsonl", folder / "out.errors.jsonl")


def run_on(store: BatchStore, folder: Path) -> int:
    """Run the file as the command does: again after lost writes; return how often they were."""
    for lost in range(5):
        try:
            run(store, folder)
        except WritesLost:
            continue
        return lost
    raise AssertionError("it does not come to its end")


def assert_whole(folder: Path, store: BatchStore) -> None:
    assert custom_ids(folder / "out.jsonl") == [f"r{n}" for n in range(LINES)]
    assert queued(store) == []
    assert windows(store) == []
    assert list(client_of(store).scan_iter("warmq:batch:run_*.*")) == []
    assert list(client_of(store).scan_iter("celery-task-meta-*")) == []


def losses() -> list[tuple[str, str, str]]:
    """Return a step since which writes are lost, and one before or after which they are."""
    steps = range(STEPS.index("create 3"), STEPS.index("create 4"))
    found = [(STEPS[at], STEPS[at], "after") for at in steps]
    return found + [
        (STEPS[at - back], STEPS[at], when)
        for at in steps for back in (1, 4) for when in ("before", "after")
    ]  # fmt: skip


@pytest.mark.parametrize(("since", "at", "when"), losses())
def test_writes_lost_at_any_step_are_made_again(
    answered: AnsweredStore, store: BatchStore, tmp_path: Path, since: str, at: str, when: str
) -> None:
    batch_file(tmp_path / "in.jsonl", LINES)
    memory, happened = Memory(store), []

    def fail_over() -> None:
        memory.fail_over()
        happened.append(at)

    steps = getattr(answered, when)
    steps[at] = fail_over
    earlier = answered.before.get(since)
    answered.before[since] = lambda: (memory.keep(), earlier and earlier())[0]
    run_on(answered, tmp_path)
    assert happened == [at]
    assert_whole(tmp_path, store)


@pytest.mark.parametrize(
    ("read", "nth"),
    [*(("batch", nth) for nth in range(3, 12)), ("index", 2), ("index", 4), ("existing", 2)],
)
def test_writes_lost_before_any_read_are_made_again(
    answered: AnsweredStore, store: BatchStore, tmp_path: Path, read: str, nth: int
) -> None:
    """A window that was submitted is gone when it is looked at for the next time."""
    batch_file(tmp_path / "in.jsonl", LINES)
    memory = Memory(store)
    memory.keep()
    real, calls = getattr(answered, read), list[object]()

    def fails_over(*args: object) -> object:
        calls.append(args)
        if len(calls) == nth:
            memory.fail_over()
        return real(*args)

    setattr(answered, read, fails_over)
    run_on(answered, tmp_path)
    assert_whole(tmp_path, store)


def test_a_window_deleted_by_a_user_is_no_lost_write(
    answered: AnsweredStore, store: BatchStore, tmp_path: Path
) -> None:
    """Also long after an absence of Redis: it had the window since."""
    batch_file(tmp_path / "in.jsonl", LINES)
    memory = Memory(store)
    answered.before["create 3"] = memory.keep
    answered.after["create 3"] = memory.fail_over

    def delete() -> None:
        for batch in windows(store):
            store.delete(batch.id, force=True)

    answered.after["seal 4"] = delete
    with pytest.raises(BatchChanged) as error:
        run(answered, tmp_path)
    assert not isinstance(error.value, WritesLost)
    assert answered.reconnects > 0
    run(answered, tmp_path)
    assert_whole(tmp_path, store)


def test_a_window_after_a_lost_one_is_queued_anew_if_it_begins_at_another_line(
    answered: AnsweredStore, store: BatchStore, tmp_path: Path
) -> None:
    # Given a killed run, of which Redis has lost the first window, but has the second
    batch_file(tmp_path / "in.jsonl", LINES)

    def stop() -> None:
        raise KeyboardInterrupt

    answered.after["seal 2"] = stop
    with pytest.raises(KeyboardInterrupt):
        run(answered, tmp_path)
    name = orjson.loads((tmp_path / "out.jsonl.progress").read_bytes())["name"]
    assert {batch.id for batch in windows(store)} == {f"{name}.0", f"{name}.1"}
    store.delete(f"{name}.0", force=True)
    # When it goes on with larger windows, its lines are not taken for those of another file
    run(answered, tmp_path, window=1000)
    assert_whole(tmp_path, store)
