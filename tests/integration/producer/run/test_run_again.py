"""`producer run --retry`: lines of a complete run run again, in the same files."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Collection
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kit.commands.runs import custom_ids, run_of, running, served, windows
from kit.commands.support import chat_line, finish, run_producer, write_lines
from kit.protocol.lessee import Lessee, client_of

from contract.errors import RequestFailed
from contract.failures import failures_of
from contract.message import read_delivery
from contract.redis.batches import BatchStore
from demo.stack import eventually

ERROR = RequestFailed("it broke", code="request_failed")
#: Lines of the file; the last one is wrong.
LINES = 1201
FAILED = {"r3", "r700", "r1100"}


def ended(
    redis_url: str,
    store: BatchStore,
    *args: str | Path,
    failed: Collection[str] = FAILED,
    cancelled: Collection[str] = (),
) -> tuple[int, str, Counter[str]]:
    """Run the command; return its status, stderr, and how often each request ran."""
    lessee, ran = Lessee(client_of(store)), Counter[str]()
    with running(redis_url, *args) as process:

        def over() -> bool:
            for name in cancelled:
                for batch in windows(store):
                    if any(entry[1] == name for c in store.index(batch.id) for entry in c.entries):
                        store.cancel_request(batch, name)
            for lease in lessee.pop(500):
                name = str(read_delivery(lease.id, lease.message).custom_id)
                ran[name] += 1
                finish(lessee, [lease], ERROR if name in failed else None)
            return process.poll() is not None

        eventually(over, 60)
        assert process.stderr is not None
        return process.returncode, process.stderr.read(), ran


@pytest.fixture
def source(tmp_path: Path) -> Path:
    lines = [chat_line(f"r{n}") for n in range(LINES - 1)]
    return write_lines(tmp_path / "in.jsonl", [*lines, chat_line("wrong", colour=1)])


@pytest.mark.parametrize("order", ["input", "prefix"])
def test_failed_lines_run_again_and_are_put_in_their_places(
    redis_url: str, store: BatchStore, tmp_path: Path, source: Path, order: str
) -> None:
    out, errors = tmp_path / "out.jsonl", tmp_path / "out.errors.jsonl"
    command = (source, out, "--window", "500", "--order", order)
    assert ended(redis_url, store, *command)[0] == 1
    assert set(custom_ids(errors)) == FAILED | {"wrong"}
    status, told, ran = ended(redis_url, store, *command, "--retry", "failed", failed={"r700"})
    assert (status, ran) == (1, dict.fromkeys(FAILED, 1))
    assert "1199 results, 2 failed" in told
    assert custom_ids(out) == [f"r{n}" for n in range(LINES - 1) if n != 700]
    assert custom_ids(errors) == ["r700", "wrong"]
    status, _, ran = ended(redis_url, store, *command, "--retry", "failed", failed=())
    assert (status, ran) == (1, {"r700": 1})
    assert custom_ids(out) == [f"r{n}" for n in range(LINES - 1)]
    assert custom_ids(errors) == ["wrong"]
    for more in ((), ("--retry", "failed")):
        done = run_producer("run", *command, *more, redis_url=redis_url)
        assert "was complete already, 1200 results, 1 failed" in done.stderr
        assert ("nothing runs again" in done.stderr) == bool(more)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "in.jsonl", "out.errors.jsonl", "out.jsonl", "out.jsonl.progress"
    ]  # fmt: skip


def test_only_the_named_outcomes_run_again(
    redis_url: str, store: BatchStore, tmp_path: Path, source: Path
) -> None:
    out, errors = tmp_path / "out.jsonl", tmp_path / "out.errors.jsonl"
    command = (source, out, "--window", "500")
    ended(redis_url, store, *command, cancelled=["r5"])
    assert set(custom_ids(errors)) == FAILED | {"r5", "wrong"}
    _, told, ran = ended(redis_url, store, *command, "--retry", "cancelled")
    assert ran == {"r5": 1}
    assert "1197 results, 4 failed" in told
    assert set(custom_ids(errors)) == FAILED | {"wrong"}


@pytest.mark.parametrize("errors", [(), ("--errors", "bad.csv")])
def test_a_table_is_written_again(
    redis_url: str, store: BatchStore, tmp_path: Path, errors: tuple[str, ...]
) -> None:
    pq.write_table(pa.table({"id": range(600), "text": ["x"] * 600}), tmp_path / "in.parquet")
    out = tmp_path / "out.parquet"
    bad = tmp_path / "bad.csv"
    command = (tmp_path / "in.parquet", out, "--map", "prompt=text", "--map", "custom_id=id",
               "--keep", "id", *[str(bad) if "." in one else one for one in errors])  # fmt: skip
    ended(redis_url, store, *command, failed={"9", "55"})
    assert Counter(pq.read_table(out)["status"].to_pylist()) == {"completed": 598, "failed": 2}
    status, told, ran = ended(redis_url, store, *command, "--retry", "failed", failed=())
    assert (status, ran) == (0, {"9": 1, "55": 1}), told
    found = pq.read_table(out)
    assert found["id"].to_pylist() == list(range(600))
    assert set(found["status"].to_pylist()) == {"completed"}
    assert not errors or len(bad.read_text().splitlines()) == 1  # its header
    assert not list(tmp_path.glob("*.lines"))
    assert "was complete already" in run_producer("run", *command, redis_url=redis_url).stderr


@pytest.mark.parametrize("more", [(), ("--retry", "failed")])
def test_an_interrupted_retry_goes_on(
    redis_url: str, store: BatchStore, tmp_path: Path, source: Path, more: tuple[str, ...]
) -> None:
    out, errors = tmp_path / "out.jsonl", tmp_path / "out.errors.jsonl"
    command = (source, out, "--window", "500")
    ended(redis_url, store, *command)
    with running(redis_url, *command, "--retry", "failed") as process:
        eventually(lambda: [one.sealed for one in windows(store)] == [True], 30, "it is queued")
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    assert set(custom_ids(errors)) == FAILED | {"wrong"}  # nothing is lost meanwhile
    status, told = served(redis_url, store, *command, *more)
    assert (status, "1200 results, 1 failed" in told) == (1, True), told
    assert custom_ids(out) == [f"r{n}" for n in range(LINES - 1)]
    assert custom_ids(errors) == ["wrong"]
    assert windows(store) == []
    assert [one.id for one in store.batches()] == [run_of(store)]


@pytest.mark.parametrize("moment", ["write", "replace"])
def test_a_retry_that_was_killed_at_its_end_is_completed(
    redis_url: str, store: BatchStore, tmp_path: Path, source: Path, moment: str
) -> None:
    """The process dies before it writes the journal, or before it replaces the error file."""
    out, errors = tmp_path / "out.jsonl", tmp_path / "out.errors.jsonl"
    command = (source, out, "--window", "500")
    ended(redis_url, store, *command)
    journal, before = out.with_name("out.jsonl.progress"), errors.read_bytes()
    complete = journal.read_bytes()
    ended(redis_url, store, *command, "--retry", "failed", failed=())
    if moment == "write":  # as it was with all windows collected
        progress = orjson.loads(journal.read_bytes())
        now = {"retry": "failed", "before": orjson.loads(complete), "format": 3, "complete": False}
        progress |= now | {"errors": len(before)}
        progress["digest"] = orjson.loads(complete)["digest"]
        journal.write_bytes(orjson.dumps(progress))
    errors.rename(errors.with_name("out.errors.jsonl.retry"))
    errors.write_bytes(before)
    done = run_producer("run", *command, redis_url=redis_url)
    assert "1200 results, 1 failed" in done.stderr, done.stderr
    assert custom_ids(errors) == ["wrong"]
    assert custom_ids(out) == [f"r{n}" for n in range(LINES - 1)]
    assert not list(tmp_path.glob("*.retry"))


def test_only_a_complete_run_runs_lines_again(
    redis_url: str, store: BatchStore, tmp_path: Path, source: Path
) -> None:
    out = tmp_path / "out.jsonl"
    with running(redis_url, source, out, "--window", "500") as process:
        eventually(lambda: len(windows(store)) == 2, 30)
        process.send_signal(signal.SIGINT)
        process.wait(20)
    refused = run_producer("run", source, out, "--retry", "failed", redis_url=redis_url)
    assert refused.returncode == 2
    assert "is not complete" in refused.stderr
    new = tmp_path / "new.jsonl"
    assert (
        run_producer("run", source, new, "--retry", "failed", redis_url=redis_url).returncode == 2
    )
    assert not new.exists()
    wrong = run_producer("run", source, out, "--retry", "cut", redis_url=redis_url)
    assert wrong.returncode == 2
    assert "--retry takes" in wrong.stderr


def record(redis_url: str) -> tuple[str, str, Counter[str], dict[str, int]]:
    """Return id, status, counts and usage of the only batch that `producer list` shows."""
    (shown,) = orjson.loads(run_producer("list", "--json", redis_url=redis_url).stdout)
    return shown["id"], shown["status"], Counter(shown["request_counts"]), shown["usage"]


def test_a_run_keeps_one_record_when_lines_run_again(
    redis_url: str, store: BatchStore, tmp_path: Path, source: Path
) -> None:
    command = (source, tmp_path / "out.jsonl", "--window", "500")
    ended(redis_url, store, *command)
    run, _, counts, usage = record(redis_url)
    assert counts == Counter(total=LINES, completed=1197, failed=4)
    with running(redis_url, *command, "--retry", "failed") as process:
        eventually(lambda: [one.sealed for one in windows(store)] == [True], 30, "it is queued")
        counts = Counter(total=LINES, completed=1197, failed=1, in_progress=3)
        assert record(redis_url) == (run, "in_progress", counts, usage)
        process.send_signal(signal.SIGKILL)
    ended(redis_url, store, *command, "--retry", "failed", failed=())
    assert record(redis_url)[:3] == (
        run, "completed", Counter(total=LINES, completed=1200, failed=1)
    )  # fmt: skip
    assert record(redis_url)[3]["completion_tokens"] > usage["completion_tokens"]


def test_a_retry_keeps_the_times_and_error_codes_of_the_run(
    redis_url: str, store: BatchStore, tmp_path: Path, source: Path
) -> None:
    command = (source, tmp_path / "out.jsonl", "--window", "500")
    ended(redis_url, store, *command)
    before = store.batch(run_of(store))
    assert before is not None
    assert before.rate is not None
    ended(redis_url, store, *command, "--retry", "failed", failed={"r700"})
    after = store.batch(before.id)
    assert after is not None
    assert (after.created, after.number("retried"), after.rate) == (before.created, 3, None)
    assert (after.seconds or 0) > (before.seconds or 0)
    codes = {one.code: one.count for one in failures_of([after])}
    assert codes == {"unknown_field": 1, "request_failed": 1}
    ended(redis_url, store, *command, "--retry", "failed", failed=())
    last = store.batch(before.id)
    assert last is not None
    assert (last.created, last.number("retried")) == (before.created, 4)
    assert [(one.code, one.count) for one in failures_of([last])] == [("unknown_field", 1)]
    assert "with retries" in run_producer("status", last.id, redis_url=redis_url).stdout


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_a_cancelled_run_runs_again_also_twice(
    redis_url: str, store: BatchStore, tmp_path: Path, source: Path, name: str
) -> None:
    out = tmp_path / name
    command = (source, out, "--window", "500")

    def cancel(*more: str) -> str:
        """Answer a few requests of the command, then cancel the run; return its stderr."""
        lessee = Lessee(client_of(store))
        with running(redis_url, *command, *more) as process:
            leases = eventually(lambda: lessee.pop(5), 30)
            finish(lessee, leases)
            cancelled = run_producer("cancel", run_of(store), redis_url=redis_url)
            assert cancelled.returncode == 0, cancelled.stderr
            assert process.wait(30) == 1
            assert process.stderr is not None
            return process.stderr.read()

    assert "--retry cancelled" in cancel()
    run = record(redis_url)[0]
    told = cancel("--retry", "cancelled")
    _, status, counts, _ = record(redis_url)
    assert (status, counts["total"], counts["completed"]) == ("cancelled", LINES, 10), told
    code, told, _ = ended(redis_url, store, *command, "--retry", "failed,cancelled", failed=())
    assert (code, "1200 results, 1 failed" in told) == (1, True), told
    assert record(redis_url)[:3] == (
        run, "completed", Counter(total=LINES, completed=1200, failed=1)
    )  # fmt: skip
    if name == "out.jsonl":
        assert custom_ids(out) == [f"r{n}" for n in range(LINES - 1)]
        assert custom_ids(out.with_suffix(".errors.jsonl")) == ["wrong"]
    else:
        found = Counter(pq.read_table(out)["status"].to_pylist())
        assert found == {"completed": 1200, "failed": 1}
