"""A Redis that loses its last writes, as a failover may: what it had confirmed is not there."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import orjson
import pytest
from kit.commands.runs import windows
from kit.commands.submitting import LIMITS, ONCE, assert_queued_once, submit
from kit.commands.support import (
    batch_file,
    producer_command,
    producer_env,
    queued,
    run_all,
    run_producer,
    state,
)
from kit.protocol.lessee import client_of
from kit.redis_servers.lost_writes import ForgetfulStore, Memory, Snapshot

from contract import naming
from contract.batch import Batch
from contract.redis import keys
from contract.redis.batches import BatchStore
from demo.stack import eventually
from producer.batch_watch import WritesLost
from producer.cli.commands.submit import MeteredSubmit
from producer.collect.collect import Collector
from producer.input.reader import Input
from producer.remedies import with_remedy
from producer.run.windows import Run
from producer.submit.submission import Submission


@pytest.fixture
def memory(store: BatchStore) -> Memory:
    return Memory(store)


@pytest.fixture
def forgetful(store: BatchStore) -> ForgetfulStore:
    return ForgetfulStore(store)


def resuming(store: BatchStore, path: Path) -> MeteredSubmit:
    return MeteredSubmit(store, LIMITS, ONCE, Input(str(path)))


def test_a_submit_whose_first_lines_are_lost_queues_them_again(
    store: BatchStore, forgetful: ForgetfulStore, memory: Memory, tmp_path: Path, capsys
):
    # Given a Redis that has lost lines 501 to 1500 when line 1501 comes
    forgetful.after["enqueue 1"] = memory.keep
    forgetful.before["enqueue 4"] = memory.put_back

    summary = resuming(forgetful, batch_file(tmp_path / "in", 1700)).submit()

    assert summary.batch.sealed
    assert_queued_once(store, 1700)
    told = capsys.readouterr().err
    assert (
        "Redis has lost its last writes (a failover?): batch b1 has only its lines up to 500"
        in told
    )


def test_a_submit_whose_last_lines_are_lost_queues_them_again(
    store: BatchStore, forgetful: ForgetfulStore, memory: Memory, tmp_path: Path
):
    forgetful.before["enqueue 3"] = memory.keep
    forgetful.before["seal 1"] = memory.put_back
    resuming(forgetful, batch_file(tmp_path / "in", 1700)).submit()
    assert_queued_once(store, 1700)


@pytest.mark.parametrize("lost_since", ["enqueue 3", "seal 1"])
def test_who_waits_for_a_batch_whose_end_is_lost_submits_it_again(
    store: BatchStore, forgetful: ForgetfulStore, memory: Memory, tmp_path: Path, lost_since: str
):
    # Given a submitted batch, of which Redis loses the end
    forgetful.before[lost_since] = memory.keep
    submitting = resuming(forgetful, batch_file(tmp_path / "in", 1700))
    batch = submitting.submit().batch
    memory.put_back()
    # And a worker that answers as soon as the batch has its end again
    real = forgetful.batch

    def answered(batch_id: str) -> Batch | None:
        found = real(batch_id)
        if found is not None and found.sealed and not found.finished:
            assert_queued_once(store, 1700)
            run_all(store)
        return found

    forgetful.batch = answered  # type: ignore[method-assign]
    # When the submit waits for it
    ended = submitting.watch_batch(batch)
    # Then it gets every answer
    assert ended.finished
    assert (ended.number("completed"), ended.number("total")) == (1700, 1700)


def test_the_command_seals_again_what_came_from_a_pipe(
    redis_url: str, store: BatchStore, memory: Memory, tmp_path: Path
):
    with subprocess.Popen(
        producer_command("submit", "-", "--batch-id", "b1", "--wait"), env=producer_env(redis_url),
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdin
        process.stdin.write(batch_file(tmp_path / "in", 1000).read_bytes())
        process.stdin.flush()
        eventually(lambda: (b := store.batch("b1")) and b.number("cursor") == 1000, 30)
        memory.keep()
        process.stdin.close()
        process.stdin = None
        eventually(lambda: state(store, "b1").sealed, 30)
        eventually(lambda: _polls(store), 30)
        memory.put_back()
        eventually(lambda: state(store, "b1").sealed, 30)
        run_all(store)
        _, told = process.communicate(timeout=30)
    assert process.returncode == 0, told
    assert b"Redis has lost its last writes (a failover?): batch b1 is not submitted" in told


def _polls(store: BatchStore) -> bool:
    # Only who watches asks Redis for its time (who is alive?).
    clients = client_of(store).client_list()
    return any(c["name"] == "warmq-producer" and c["cmd"] == "time" for c in clients)


def test_lost_lines_of_a_pipe_are_asked_for_with_the_same_command(
    redis_url: str, store: BatchStore, forgetful: ForgetfulStore, memory: Memory, tmp_path: Path
):
    path = batch_file(tmp_path / "in", 1700)
    forgetful.before["enqueue 2"] = memory.keep
    forgetful.before["enqueue 3"] = memory.put_back
    with pytest.raises(WritesLost) as error:
        submit(forgetful, path)
    assert with_remedy(error.value).endswith("--batch-id b1 goes on where it stopped")

    done = run_producer("submit", path, "--batch-id", "b1", redis_url=redis_url)

    assert done.returncode == 0, done.stderr
    assert_queued_once(store, 1700)


def test_who_follows_results_of_a_batch_whose_end_is_lost_is_told_and_does_not_wait_for_ever(
    store: BatchStore, forgetful: ForgetfulStore, memory: Memory, tmp_path: Path
):
    forgetful.before["seal 1"] = memory.keep
    batch = submit(forgetful, batch_file(tmp_path / "in", 700)).batch
    memory.put_back()
    run_all(store)
    with pytest.raises(WritesLost, match="batch b1 is not submitted to its end any more"):
        list(Collector(store, batch, follow=True).lines("input"))


# -- producer run ---------------------------------------------------------------


class ServedStore(ForgetfulStore):
    """Every look at a batch finds that a worker has answered what was queued."""

    look: Callable[[], None] = staticmethod(lambda: None)
    #: Called with the id of each batch that was deleted.
    deleted: Callable[[str], None] = staticmethod(lambda batch_id: None)

    def batch(self, batch_id: str) -> Batch | None:
        self.look()
        return super().batch(batch_id)

    def delete(self, batch_id: str, *, force: bool = False) -> bool:
        found = super().delete(batch_id, force=force)
        self.deleted(batch_id)
        return found


def run(store: BatchStore, folder: Path) -> None:
    """Take a file of 1,700 lines through in windows of 500."""
    submission = Submission("run", naming.DEFAULT_QUEUE, 6)
    whole = Run(store, LIMITS, submission, 500, lambda done, waiting: None)
    with closing(Input(str(folder / "in.jsonl"))) as source:
        whole.run(source, folder / "out.jsonl", folder / "out.errors.jsonl")


def assert_whole(folder: Path, store: BatchStore) -> None:
    lines = (folder / "out.jsonl").read_bytes().splitlines()
    assert [orjson.loads(line)["custom_id"] for line in lines] == [f"r{n}" for n in range(1700)]
    assert queued(store) == []
    assert list(client_of(store).scan_iter("warmq:batch:run_*.*")) == []
    assert list(client_of(store).scan_iter("celery-task-meta-*")) == []
    assert windows(store) == []


@pytest.mark.parametrize("lost_since", ["enqueue 2", "seal 2"])
def test_a_run_with_a_window_that_is_lost_fails_and_the_same_command_goes_on(
    store: BatchStore, memory: Memory, tmp_path: Path, lost_since: str
):
    batch_file(tmp_path / "in.jsonl", 1700)
    served = ServedStore(store)
    served.look = lambda: run_all(store)
    served.before[lost_since] = memory.keep
    # When the second window, of two that are queued, is lost before it is collected
    served.deleted = lambda batch_id: memory.put_back() if batch_id.endswith(".0") else None
    with pytest.raises(WritesLost, match=r"batch run_\w+\.1 is not submitted to its end any more"):
        run(served, tmp_path)
    journal = orjson.loads((tmp_path / "out.jsonl.progress").read_bytes())
    assert (journal["windows"], journal["completed"]) == (1, 500)

    again = ServedStore(store)
    again.look = lambda: run_all(store)
    run(again, tmp_path)

    assert_whole(tmp_path, store)


def test_a_run_with_a_window_that_is_deleted_fails_and_the_same_command_goes_on(
    redis_url: str, store: BatchStore, tmp_path: Path
):
    source, out = batch_file(tmp_path / "in.jsonl", 1700), tmp_path / "out.jsonl"
    with subprocess.Popen(
        producer_command("run", source, out, "--window", "500"), env=producer_env(redis_url),
        stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        found = eventually(lambda: windows(store), 30)
        first = min(found, key=lambda batch: batch.id)  # the second window may be there already
        eventually(lambda: state(store, first.id).sealed, 30)
        store.delete(first.id, force=True)  # not cancelled first: the run might collect that
        _, told = process.communicate(timeout=30)
    assert process.returncode == 2
    assert b"was deleted while its results were read, or Redis was emptied; the same" in told
    assert b"command goes on where it stopped" in told

    served = ServedStore(store)
    served.look = lambda: run_all(store)
    run(served, tmp_path)
    assert_whole(tmp_path, store)


def test_windows_that_come_back_after_they_were_deleted_are_deleted_again(
    store: BatchStore, tmp_path: Path
):
    # Given a Redis in which a deleted window of the run is there again, not finished
    batch_file(tmp_path / "in.jsonl", 1700)
    served, kept = ServedStore(store), []
    served.look = lambda: run_all(store)
    served.before["seal 2"] = lambda: kept.append(
        Snapshot(client_of(store), "warmq:batch:run_*.1*")
    )

    def come_back(batch_id: str) -> None:
        if batch_id.endswith(".1"):
            served.deleted = lambda batch_id: None
            kept[0].restore(client_of(store), alone=False)
            client_of(store).zadd(keys.BATCHES, {batch_id: 1})
            assert not state(store, batch_id).finished

    served.deleted = come_back
    run(served, tmp_path)
    assert kept
    assert_whole(tmp_path, store)


def test_a_run_that_goes_on_deletes_windows_that_came_back(store: BatchStore, tmp_path: Path):
    # Given a run that stopped when its second window was done
    batch_file(tmp_path / "in.jsonl", 1700)
    served, kept = ServedStore(store), []
    served.look = lambda: run_all(store)
    served.before["seal 2"] = lambda: kept.append(
        Snapshot(client_of(store), "warmq:batch:run_*.0*")
    )

    def stop(batch_id: str) -> None:
        if batch_id.endswith(".1"):
            raise KeyboardInterrupt

    served.deleted = stop
    with pytest.raises(KeyboardInterrupt):
        run(served, tmp_path)
    # And a failover that brings the first one back
    kept[0].restore(client_of(store), alone=False)
    assert len(client_of(store).keys("warmq:batch:run_*.0")) == 1
    # When the same command goes on
    served.deleted = lambda batch_id: None
    run(served, tmp_path)
    # Then none is left
    assert_whole(tmp_path, store)
