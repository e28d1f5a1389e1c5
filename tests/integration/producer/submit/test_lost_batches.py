"""A batch that is gone where Redis was away is lost; else it was deleted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from kit.commands.submitting import LIMITS, ONCE, assert_queued_once, submit
from kit.commands.support import TTL_MS, batch_file, chat_line, queued, run_all
from kit.redis_servers.lost_writes import ForgetfulStore, Memory

from contract.batch import Batch
from contract.redis.batches import BatchStore
from producer.batch_watch import BatchChanged, WritesLost
from producer.cli import progress
from producer.cli.commands.submit import MeteredSubmit
from producer.client import Client
from producer.collect.collect import Collector
from producer.input.reader import Input
from producer.remedies import with_remedy
from producer.submit.submission import Submission

PLANNED = replace(ONCE, order="prefix")


@pytest.fixture
def forgetful(redis_url: str) -> Iterator[ForgetfulStore]:
    """Return the store of a producer, whose connections break in a failover."""
    with closing(BatchStore.open(redis_url, "warmq-producer", ttl_ms=TTL_MS)) as own:
        yield ForgetfulStore(own)


@pytest.fixture
def memory(store: BatchStore) -> Memory:
    """Return what Redis had at first: nothing."""
    found = Memory(store)
    found.keep()
    return found


def resuming(store: BatchStore, path: Path, submission: Submission = ONCE) -> MeteredSubmit:
    return MeteredSubmit(store, LIMITS, submission, Input(str(path)))


def deletes(store: BatchStore) -> Callable[[], None]:
    return lambda: (store.delete("b1", force=True), None)[1]


@pytest.mark.parametrize("when", ["after create 1", "before enqueue 1", "before enqueue 3",
                                  "before seal 1", "after seal 1"])  # fmt: skip
def test_a_submit_whose_batch_is_lost_queues_it_again(
    store: BatchStore, forgetful: ForgetfulStore, memory: Memory, tmp_path: Path, when: str
) -> None:
    side, step = when.split(" ", 1)
    getattr(forgetful, side)[step] = memory.fail_over
    batch = resuming(forgetful, batch_file(tmp_path / "in", 1700)).submit().batch
    assert batch.sealed
    assert forgetful.reconnects > 0
    assert_queued_once(store, 1700)


@pytest.mark.parametrize("when", ["before enqueue_planned 1", "before enqueue_planned 3"])
def test_a_planned_submit_whose_batch_is_lost_queues_it_again(
    store: BatchStore, forgetful: ForgetfulStore, memory: Memory, tmp_path: Path, when: str
) -> None:
    forgetful.before[when.split(" ", 1)[1]] = memory.fail_over
    batch = resuming(forgetful, batch_file(tmp_path / "in", 1700), PLANNED).submit().batch
    assert (batch.sealed, batch.number("total")) == (True, 1700)
    names = [message["headers"]["warmq"]["custom_id"] for message in queued(store)]
    assert sorted(names) == sorted(f"r{n}" for n in range(1700))


@pytest.mark.parametrize("step", ["enqueue 1", "enqueue 3", "seal 1"])
def test_a_batch_that_is_deleted_while_it_is_submitted_stays_deleted(
    store: BatchStore, forgetful: ForgetfulStore, memory: Memory, tmp_path: Path, step: str
) -> None:
    forgetful.before["create 1"] = memory.fail_over  # Redis has had the batch since
    forgetful.before[step] = deletes(store)
    with pytest.raises(BatchChanged) as error:
        resuming(forgetful, batch_file(tmp_path / "in", 1700)).submit()
    assert not isinstance(error.value, WritesLost)
    assert store.batches() == []


def test_a_lost_batch_of_a_pipe_is_asked_for_with_the_same_command(
    forgetful: ForgetfulStore, memory: Memory, tmp_path: Path
) -> None:
    forgetful.before["enqueue 2"] = memory.fail_over
    with pytest.raises(WritesLost) as error:
        submit(forgetful, batch_file(tmp_path / "in", 700))
    assert error.value.remedy == "submit_from_start"
    assert "--batch-id b1" in with_remedy(error.value)


def test_who_waits_for_a_batch_that_is_lost_submits_it_again(
    store: BatchStore, forgetful: ForgetfulStore, memory: Memory, tmp_path: Path
) -> None:
    submitting = resuming(forgetful, batch_file(tmp_path / "in", 1700))
    batch = submitting.submit().batch
    memory.fail_over()
    forgetful.after["seal 3"] = lambda: (run_all(store), None)[1]
    ended = submitting.watch_batch(batch)
    assert (ended.finished, ended.number("completed")) == (True, 1700)


def test_a_program_that_waits_for_a_batch_that_is_lost_submits_it_again(
    store: BatchStore, forgetful: ForgetfulStore, memory: Memory, redis_url: str
) -> None:
    client = Client(redis_url)
    client.__dict__["_store"] = forgetful
    batch = client.submit([chat_line("r0")], batch_id="b1")
    memory.fail_over()
    forgetful.after["seal 3"] = lambda: (run_all(store), None)[1]
    assert batch.wait(30).completed == 1


def watches(store: BatchStore, batch: Batch) -> None:
    progress.watch(store, batch)


def follows(store: BatchStore, batch: Batch) -> None:
    list(Collector(store, batch, follow=True, sleep=lambda wait_s: None).lines("input"))


def follows_as_they_end(store: BatchStore, batch: Batch) -> None:
    list(Collector(store, batch, follow=True, sleep=lambda wait_s: None).lines("completion"))


FOLLOWERS = [watches, follows, follows_as_they_end]


@pytest.mark.parametrize("follower", FOLLOWERS)
@pytest.mark.parametrize("replaced", [False, True])
def test_who_only_follows_a_batch_is_told_that_redis_has_lost_it(
    store: BatchStore, forgetful: ForgetfulStore, memory: Memory, tmp_path: Path,
    follower: Callable[[BatchStore, Batch], None], replaced: bool,
) -> None:  # fmt: skip
    path = batch_file(tmp_path / "in", 700)
    batch = submit(forgetful, path).batch
    memory.fail_over()
    if replaced:
        submit(store, path)
    with pytest.raises(WritesLost) as error:
        follower(forgetful, batch)
    assert error.value.remedy == ("read_new_batch" if replaced else "submit_again")


@pytest.mark.parametrize("follower", FOLLOWERS)
def test_who_follows_a_batch_that_is_deleted_is_told_so(
    store: BatchStore, forgetful: ForgetfulStore, memory: Memory, tmp_path: Path,
    follower: Callable[[BatchStore, Batch], None],
) -> None:  # fmt: skip
    batch = submit(forgetful, batch_file(tmp_path / "in", 700)).batch
    store.delete("b1", force=True)
    with pytest.raises(BatchChanged) as error:
        follower(forgetful, batch)
    assert not isinstance(error.value, WritesLost)


@pytest.mark.parametrize("order", ["input", "completion"])
def test_results_that_are_lost_while_they_are_followed_come_once(
    store: BatchStore, forgetful: ForgetfulStore, memory: Memory, tmp_path: Path, order: str
) -> None:
    """A failover after the first results: the batch is as it was before any was computed."""
    batch = submit(forgetful, batch_file(tmp_path / "in", 700)).batch
    memory.keep()
    run_all(store)
    lines = Collector(forgetful, batch, follow=True, sleep=lambda s: (run_all(store), None)[1])
    found = []
    for line in lines.lines(order):
        found.append(line.json)
        if len(found) == 1:
            memory.fail_over()
    assert len(found) == len({line.split(b'"custom_id":')[1][:8] for line in found}) == 700


def test_a_result_that_came_again_while_redis_was_away_is_not_taken_as_lost(
    store: BatchStore, forgetful: ForgetfulStore, memory: Memory, tmp_path: Path
) -> None:
    """The batch is finished before and after; a result was not there in between."""
    batch = submit(forgetful, batch_file(tmp_path / "in", 3)).batch
    memory.keep()
    run_all(store)
    real, calls = forgetful.results, list[int]()

    def results(request_ids: list[str]) -> list[bytes | None]:
        calls.append(len(request_ids))
        if len(calls) == 1:
            memory.fail_over()
            found = real(request_ids)
            run_all(store)
            return found
        return real(request_ids)

    forgetful.results = results  # type: ignore[method-assign,assignment]
    collector = Collector(forgetful, batch, follow=True, sleep=lambda s: None)
    ids = [rid for chunk in store.index("b1") for rid in chunk.request_ids("b1")]
    raws, lost = collector._read_again(ids)
    assert (None in raws, lost, calls) == (False, True, [3, 3])
