"""Results read while the batch is deleted, expires, is submitted anew or is retried under the
reader: one line for each request, or an error that says what happened and no file."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson
import pytest
from kit.commands.submitting import submit
from kit.commands.support import (
    batch_file,
    finish,
    producer_command,
    producer_env,
    run_all,
    run_producer,
    state,
)
from kit.protocol.lessee import Lessee, client_of, now
from kit.redis_servers.lost_writes import Snapshot

from contract.batch import Batch
from contract.errors import RequestFailed, WarmqError
from contract.redis.batches import BatchStore
from contract.results import ResultLine
from demo.stack import eventually
from producer.cli.collect import write
from producer.collect.collect import Collector
from producer.collect.columns import OutputColumns
from producer.remedies import with_remedy

#: More than are read from the index at once, which are 4,000.
REQUESTS = 4600
FAILED = range(4100, 4200)
#: In the first part of the index, at the end of it (its results are under way), and in the second.
PLACES = [1, 3700, 4550]
ORDERS = ["input", "completion"]


@pytest.fixture(scope="module")
def kept() -> dict[str, Snapshot]:
    """What the first test has made, for the others."""
    return {}


@pytest.fixture
def ended(store: BatchStore, tmp_path: Path, kept: dict[str, Snapshot]) -> BatchStore:
    """A batch of which all requests have ended, some of them failed."""
    path = batch_file(tmp_path / "in.jsonl", REQUESTS)
    if "ended" in kept:
        kept["ended"].restore(client_of(store))
        return store
    submit(store, path)
    lessee = Lessee(client_of(store))
    for start in range(0, FAILED.start, 500):
        finish(lessee, lessee.pop(min(500, FAILED.start - start)))
    finish(lessee, lessee.pop(len(FAILED)), RequestFailed("the engine choked"))
    run_all(store)
    assert state(store, "b1").finished
    kept["ended"] = Snapshot(client_of(store))
    return store


def collector(store: BatchStore, *, follow: bool) -> Collector:
    """Return a reader of b1; requests that it waits for are answered."""
    patience = 1000

    def work(_: float) -> None:
        nonlocal patience
        patience -= 1
        assert patience, "it waits for something that will not come"
        run_all(store)

    return Collector(store, state(store, "b1"), follow=follow, sleep=work)


def collect(
    store: BatchStore, folder: Path, order: str, at: int, happens: Callable[[], None],
    *, follow: bool = False,
) -> list[str]:  # fmt: skip
    """Collect b1 into files, let something happen after `at` lines; return the custom_ids."""
    out, errors = folder / "out.jsonl", folder / "errors.jsonl"

    def watched(lines: Iterator[ResultLine]) -> Iterator[ResultLine]:
        for number, line in enumerate(lines, 1):
            yield line
            if number == at:
                happens()

    try:
        lines = watched(collector(store, follow=follow).lines(order))
        write(lines, OutputColumns(), str(out), str(errors), lambda _: None)
    except WarmqError:
        assert not out.exists()
        assert not errors.exists()
        raise
    return [
        orjson.loads(x)["custom_id"] for f in (out, errors) for x in f.read_bytes().splitlines()
    ]


def delete(store: BatchStore) -> None:
    assert store.delete("b1")


def submit_anew(store: BatchStore, folder: Path) -> None:
    delete(store)
    submit(store, folder / "in.jsonl")
    run_all(store)


@pytest.mark.parametrize("follow", [False, True], ids=["", "follow"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("at", PLACES)
@pytest.mark.parametrize(
    ("happens", "told"),
    [
        (lambda store, folder: delete(store), "batch b1 was deleted while its results were read"),
        (
            lambda store, folder: client_of(store).flushall(),
            "or Redis was emptied; submit the file",
        ),
        (submit_anew, "batch b1 was deleted and submitted again while its results were read"),
    ],
    ids=["deleted", "emptied", "submitted anew"],
)
def test_a_batch_that_is_gone_is_told_and_no_file_appears(
    ended: BatchStore, tmp_path: Path, happens, told: str, at: int, order: str, follow: bool
):
    with pytest.raises(WarmqError) as error:
        collect(ended, tmp_path, order, at, lambda: happens(ended, tmp_path), follow=follow)
    assert told in with_remedy(error.value)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("at", [3700, 4550])
def test_a_batch_that_expires_is_told_so_and_no_file_appears(
    ended: BatchStore, tmp_path: Path, at: int, order: str
):
    # Given a batch whose results a worker has given two seconds more
    ids = [rid for chunk in ended.index("b1") for rid in chunk.request_ids("b1")]
    Lessee(client_of(ended)).run("retire", "b1", now(ended).life, 2_000, 1, *ids)

    def wait() -> None:
        eventually(lambda: ended.batch("b1") is None, 10)

    with pytest.raises(WarmqError) as error:
        collect(ended, tmp_path, order, at, wait)
    told = with_remedy(error.value)
    assert told.startswith("batch b1 expired while its results were read; submit")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("at", PLACES)
def test_of_a_batch_that_is_retried_no_line_is_missing_or_twice(
    ended: BatchStore, tmp_path: Path, at: int, order: str
):
    def retry() -> None:
        assert ended.retry(state(ended, "b1"), ["failed"]) == len(FAILED)

    try:
        given = collect(ended, tmp_path, order, at, retry)
    except WarmqError as error:
        assert "batch b1 was retried while its results were read" in error.message
        assert "`producer results b1 --follow` waits" in with_remedy(error)
    else:
        assert at > FAILED.stop  # they had been read before
        assert sorted(given) == sorted(f"r{n}" for n in range(REQUESTS))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("at", PLACES)
def test_who_follows_a_batch_that_is_retried_gets_every_line_once(
    ended: BatchStore, tmp_path: Path, at: int, order: str
):
    def retry() -> None:
        ended.retry(state(ended, "b1"), ["failed"])

    given = collect(ended, tmp_path, order, at, retry, follow=True)
    assert sorted(given) == sorted(f"r{n}" for n in range(REQUESTS))


def test_a_result_that_is_retried_is_not_told_to_be_lost(ended: BatchStore):
    # Given a reader that follows a batch which is being retried
    ended.retry(state(ended, "b1"), ["failed"])
    real, armed, waits = ended.batch, False, 0

    def batch(batch_id: str) -> Batch | None:
        """Let the requests fail again before the look, and be retried once more after it."""
        nonlocal armed
        if not armed:
            return real(batch_id)
        armed = False
        lessee = Lessee(client_of(ended))
        finish(lessee, lessee.pop(500), RequestFailed("the engine choked"))
        found = real(batch_id)
        assert found is not None and found.finished
        ended.retry(found, ["failed"])
        return found

    def work(_: float) -> None:
        nonlocal armed, waits
        waits += 1
        if waits == 1:
            armed = True
        else:
            run_all(ended)

    ended.batch = batch  # type: ignore[method-assign]
    lines = list(Collector(ended, state(ended, "b1"), follow=True, sleep=work).lines("input"))

    assert waits > 1
    assert [line for line in lines if line.failed] == []
    assert len(lines) == REQUESTS


def test_a_command_whose_batch_is_deleted_ends_with_2_and_says_why(
    redis_url: str, ended: BatchStore, tmp_path: Path
):
    # Given a reader that is stopped by a full pipe
    with subprocess.Popen(
        producer_command("results", "b1"), env=producer_env(redis_url),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout
        assert process.stdout.readline()
        delete(ended)
        printed, told = process.communicate()
    assert process.returncode == 2
    assert printed.count(b"\n") + 1 < REQUESTS
    assert b"producer: batch b1 was deleted while its results were read" in told
    assert b"Traceback" not in told


def test_partial_results_say_how_many_of_how_many(
    redis_url: str, store: BatchStore, tmp_path: Path
):
    submit(store, batch_file(tmp_path / "in.jsonl", 700))
    lessee = Lessee(client_of(store))
    finish(lessee, lessee.pop(300))
    finish(lessee, lessee.pop(20), RequestFailed("the engine choked"))
    out = tmp_path / "out.jsonl"
    done = run_producer("results", "b1", "--partial", "-o", out, redis_url=redis_url)
    assert done.returncode == 1
    assert "b1: 300 results, 20 failed, of 700 requests" in done.stderr
    store.cancel(now(store))
    done = run_producer("results", "b1", "-o", out, "--force", redis_url=redis_url)
    assert "b1: 300 results, 20 failed, 380 cancelled" in done.stderr
