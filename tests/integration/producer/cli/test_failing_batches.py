"""A batch that goes wrong: what failed, how it is stopped, what a retry would do."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kit.commands.support import (
    batch_file,
    chat_line,
    finish,
    producer_command,
    producer_env,
    run_all,
    run_producer,
    write_lines,
)
from kit.protocol.lessee import Lessee, client_of, counts, now, submit_batch

from contract.errors import RequestFailed, RequestRejected
from contract.redis import keys
from contract.redis.batches import BatchStore
from demo.stack import eventually
from producer import Client
from producer.cli.unchanged import unchanged_texts
from producer.input.options import BadOption

ERROR = RequestFailed("it broke", code="broken")
TOO_LONG = RequestRejected("the prompt is too long", code="context_length_exceeded")
UNSERVED = RequestRejected("no such model", code="model_not_found")


def wrong_lines(path: Path, count: int, wrong: int) -> Path:
    """Write lines of which the first ones have an unknown field."""
    return write_lines(
        path, (chat_line(f"r{n}", **({"colour": 1} if n < wrong else {})) for n in range(count))
    )


def test_status_has_failures_by_code_with_the_first_ones(
    redis_url: str, tmp_path: Path, store: BatchStore
) -> None:
    run_producer("submit", wrong_lines(tmp_path / "in", 5, 2), "--batch-id", "b1",
                 redis_url=redis_url)  # fmt: skip
    lessee = Lessee(client_of(store))
    finish(lessee, lessee.pop(1), ERROR)
    done = run_producer("status", "b1", "--json", redis_url=redis_url)
    first, second = orjson.loads(done.stdout)["failures"]
    assert (first["code"], first["count"], len(first["first"])) == ("unknown_field", 2, 2)
    assert (second["code"], second["first"][0]["custom_id"]) == ("broken", "r2")
    table = run_producer("status", "b1", redis_url=redis_url).stdout
    assert "3 of 3 failed: 2 unknown_field, 1 broken" in table
    assert "line 3, custom_id r2: broken: it broke" in table
    # They are beneath their counts, and what the requests wait for stands apart, last
    rows, _, notes = table.partition("\n\n")
    at = next(n for n, row in enumerate(rows.splitlines()) if row.startswith("failures"))
    assert all("custom_id r" in row for row in rows.splitlines()[at + 1 : at + 4])
    assert "no worker" in notes and "custom_id" not in notes
    listed = orjson.loads(run_producer("list", "--json", redis_url=redis_url).stdout)
    assert [one["code"] for one in listed[0]["failures"]] == ["unknown_field", "broken"]


def test_status_of_a_stopped_batch_separates_what_ended_after_the_stop(
    redis_url: str, tmp_path: Path, store: BatchStore
) -> None:
    run_producer("submit", batch_file(tmp_path / "in", 9), "--batch-id", "b1",
                 "--stop-after-failures", "2", redis_url=redis_url)  # fmt: skip
    lessee = Lessee(client_of(store))
    leases = lessee.pop(5)
    finish(lessee, leases[:2], ERROR)
    shown = run_producer("status", "b1", redis_url=redis_url).stdout
    assert "stopped: 2 of 2 requests failed" in shown and "after the stop" not in shown
    finish(lessee, leases[2:])
    shown = run_producer("status", "b1", redis_url=redis_url).stdout
    assert "2 of 5 failed: broken (3 of them ended after the stop)" in shown


def test_watch_prints_failures_as_soon_as_there_are_some(redis_url: str, store: BatchStore) -> None:
    submit_batch(store, 3)
    lessee = Lessee(client_of(store))
    leases = lessee.pop()
    with subprocess.Popen(
        producer_command("watch", "b1"), env=producer_env(redis_url), stderr=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        process.stderr.readline()
        finish(lessee, leases[:2], ERROR)
        while "failed" not in (line := process.stderr.readline()):
            assert line
        assert line == "b1: 2 of 2 failed: broken\n"
        finish(lessee, leases[2:])
        _, told = process.communicate(timeout=20)
    assert "b1: 2 of 3 failed: broken" in told
    assert process.returncode == 1
    again = run_producer("watch", "b1", redis_url=redis_url)
    assert (again.returncode, again.stderr.count("of 3 failed")) == (1, 1)


@pytest.mark.parametrize("more", [(), ("--order", "prefix"), ("--wait",)])
def test_a_submit_whose_lines_are_rejected_is_stopped_and_says_why(
    redis_url: str, tmp_path: Path, store: BatchStore, more: tuple[str, ...]
) -> None:
    path = wrong_lines(tmp_path / "in", 2500, 150)
    done = run_producer("submit", path, "--batch-id", "b1", "--stop-after-failures", "100", *more,
                        redis_url=redis_url)  # fmt: skip
    assert done.returncode == 1, done.stderr
    batch = now(store)
    assert (batch.status, batch.stopped) == ("cancelled", True)
    assert counts(batch)["failed"] == 150
    assert "stopped: 150 of 150 requests failed" in done.stderr
    state = orjson.loads(run_producer("status", "b1", "--json", redis_url=redis_url).stdout)
    assert state["stop_after_failures"] == "100"
    assert state["reason"].startswith("stopped: 150")


def test_rejected_lines_alone_are_no_share_of_what_has_ended(
    redis_url: str, tmp_path: Path, store: BatchStore
) -> None:
    """3 % of the lines are rejected, at once; the others wait for a worker."""
    path = wrong_lines(tmp_path / "in", 5000, 150)
    done = run_producer("submit", path, "--batch-id", "b1", "--stop-after-failures", "40%",
                        redis_url=redis_url)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert now(store).status == "in_progress"
    run_all(store)
    assert now(store).status == "completed"


def test_a_stopped_batch_goes_on_after_a_retry_and_the_same_submit(
    redis_url: str, tmp_path: Path, store: BatchStore
) -> None:
    path = wrong_lines(tmp_path / "in", 2000, 10)
    command = ("submit", path, "--batch-id", "b1", "--stop-after-failures", "10")
    assert run_producer(*command, redis_url=redis_url).returncode == 1
    assert counts(now(store)) == {"cancelled": 1990, "failed": 10}
    again = run_producer(*command, redis_url=redis_url)
    assert again.returncode == 1
    assert "--include cancelled" in again.stderr  # the way on
    retried = run_producer("retry", "b1", "--include", "cancelled", redis_url=redis_url)
    assert "1990 requests queued again" in retried.stderr
    assert run_producer(*command, redis_url=redis_url).returncode == 0
    run_all(store)
    assert counts(now(store)) == {"completed": 1990, "failed": 10}


@pytest.mark.parametrize("more", [(), ("--order", "prefix")])
def test_a_table_of_a_stopped_submit_has_all_rows(
    redis_url: str, tmp_path: Path, store: BatchStore, more: tuple[str, ...]
) -> None:
    rows = [{"id": n, "prompt": None if n < 10 else f"question {n}"} for n in range(1300)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    out = tmp_path / "out.parquet"
    command = ("submit", tmp_path / "in.parquet", "--batch-id", "b1", "--map", "prompt={prompt}",
               "--map", "custom_id=id", "--keep", "id", *more)  # fmt: skip
    done = run_producer(*command, "--stop-after-failures", "10", "-o", out, redis_url=redis_url)
    assert done.returncode == 1, done.stderr
    found = pq.read_table(out)
    assert found["id"].to_pylist() == list(range(1300))
    assert Counter(found["status"].to_pylist()) == {"failed": 10, "cancelled": 1290}
    last = found.to_pylist()[-1]
    assert (last["error_code"], last["error_message"]) == ("cancelled", now(store).fields["reason"])
    # The chunk with the first failures has 500 lines; with an order, nothing is queued before.
    assert f"{1290 if more else 800} requests had not been submitted by then" in done.stderr
    assert "the same submit goes on with another --stop-after-failures" in done.stderr
    later = tmp_path / "later.parquet"
    run_producer("results", "b1", "-o", later, redis_url=redis_url)
    assert pq.read_table(later).equals(found)


@pytest.mark.parametrize("limit", [(), ("--stop-after-failures", "50%")])
def test_a_stopped_submit_goes_on_with_another_limit(
    redis_url: str, tmp_path: Path, store: BatchStore, limit: tuple[str, ...]
) -> None:
    path = batch_file(tmp_path / "in", 700)
    command = ("submit", path, "--batch-id", "b1")
    run_producer(*command, "--stop-after-failures", "3", redis_url=redis_url)
    lessee = Lessee(client_of(store))
    finish(lessee, lessee.pop(5)[:3], ERROR)
    assert now(store).stopped
    done = run_producer(*command, *limit, redis_url=redis_url)
    assert done.returncode == 0, done.stderr
    assert "requests run again" in done.stderr
    state = orjson.loads(run_producer("status", "b1", "--json", redis_url=redis_url).stdout)
    assert (state["status"], state["reason"]) == ("in_progress", None)
    assert state["stop_after_failures"] == (limit[1] if limit else None)


def test_the_limit_of_a_running_batch_is_changed_by_the_same_submit(
    redis_url: str, tmp_path: Path, store: BatchStore
) -> None:
    path = batch_file(tmp_path / "in", 20)
    command = ("submit", path, "--batch-id", "b1")
    for limit in ((), ("--stop-after-failures", "2")):
        assert run_producer(*command, *limit, redis_url=redis_url).returncode == 0
    lessee = Lessee(client_of(store))
    finish(lessee, lessee.pop(2), ERROR)
    assert now(store).stopped


def test_an_option_that_differs_is_named_as_the_command_names_it(
    redis_url: str, tmp_path: Path
) -> None:
    command = ("submit", batch_file(tmp_path / "in", 2), "--batch-id", "b1")
    run_producer(*command, "--dedupe", redis_url=redis_url)
    done = run_producer(*command, redis_url=redis_url)
    assert done.returncode == 2
    assert "dedupe was true, now not given" in done.stderr


@pytest.mark.parametrize("value", ["0", "-1", "101%", "0%", "1.5", "many", "5%%", "", "%"])
def test_a_wrong_limit_is_refused_before_anything_is_queued(
    redis_url: str, tmp_path: Path, store: BatchStore, value: str
) -> None:
    path = batch_file(tmp_path / "in", 1)
    done = run_producer("submit", path, f"--stop-after-failures={value}", redis_url=redis_url)
    assert done.returncode == 2
    assert f"--stop-after-failures {value}: give a number" in done.stderr
    assert store.batches() == []


def test_the_client_stops_too_and_has_the_failures(redis_url: str, store: BatchStore) -> None:
    with Client(redis_url) as client:
        batch = client.submit(
            [{"prompt": "x", "colour": n} for n in range(20)] + [{"prompt": "x"}] * 5,
            stop_after_failures=20,
        )
        status = batch.status()
        assert (status.status, status.failures) == ("cancelled", {"unknown_field": 20})
        assert status.reason.startswith("stopped: 20 of 20")
        requests = [{"prompt": "x", "colour": 1}] * 3 + [{"prompt": "x"}] * 1000
        batch = client.submit(requests, batch_id="b1", stop_after_failures=3)
        codes = Counter(result.error and result.error.code for result in batch.results("input"))
        assert codes == {"unknown_field": 3, "cancelled": 1000}
        again = client.submit(requests, batch_id="b1")
        assert (again.status().status, again.status().pending) == ("in_progress", 1000)
        for wrong in (0, True, 5.5, "x"):
            with pytest.raises(BadOption, match="stop_after_failures"):
                client.submit([], stop_after_failures=wrong)  # type: ignore[arg-type]


def test_retry_says_what_it_would_do_where_nothing_can_be_retried(
    redis_url: str, tmp_path: Path, store: BatchStore
) -> None:
    run_producer("submit", wrong_lines(tmp_path / "in", 1500, 2), "--batch-id", "b1",
                 redis_url=redis_url)  # fmt: skip
    store.cancel(now(store))
    done = run_producer("retry", "b1", redis_url=redis_url)
    assert "0 requests queued again" in done.stderr
    assert "1,498 requests are cancelled: --include cancelled" in done.stderr
    assert "2 failed lines are wrong themselves" in done.stderr
    assert "stay" not in done.stderr
    done = run_producer("retry", "b1", "--include", "cancelled", redis_url=redis_url)
    assert "1498 requests queued again" in done.stderr
    assert "--include" not in done.stderr


def test_retry_tells_wrong_lines_from_messages_that_are_gone(
    redis_url: str, tmp_path: Path, store: BatchStore
) -> None:
    run_producer("submit", wrong_lines(tmp_path / "in", 5, 1), "--batch-id", "b1",
                 redis_url=redis_url)  # fmt: skip
    lessee = Lessee(client_of(store))
    leases = lessee.pop()
    finish(lessee, leases, ERROR)
    client_of(store).delete(keys.batch_key("b1", f"kept:{leases[0].request_id}"))
    done = run_producer("retry", "b1", redis_url=redis_url)
    assert "b1: 3 requests queued again\n" in done.stderr
    assert "b1: 1 request stays as it ended: Redis has no message of it" in done.stderr
    assert "b1: 1 failed line is wrong itself" in done.stderr
    assert "again already" not in done.stderr


def test_retry_names_every_failed_line_that_it_leaves_out(
    redis_url: str, tmp_path: Path, store: BatchStore
) -> None:
    run_producer("submit", wrong_lines(tmp_path / "in", 6, 1), "--batch-id", "b1",
                 redis_url=redis_url)  # fmt: skip
    lessee = Lessee(client_of(store))
    for error in (TOO_LONG, UNSERVED, ERROR):
        finish(lessee, lessee.pop(1), error)
    suspects = [f"{lessee.queue}:suspects"]
    for lists in ([], suspects, suspects):
        (lease,) = lessee.pop(1, lists=lists)
        lessee.release(lease, died=[lease], max_deaths=1)
    finish(lessee, lessee.pop(1))
    done = run_producer("retry", "b1", redis_url=redis_url)
    assert "b1: 1 request queued again\n" in done.stderr
    assert (
        "b1: 2 failed lines are wrong themselves (1 unknown_field, 1 context_length_exceeded): "
        "correct them"
    ) in done.stderr
    assert "b1: 1 request is a dead letter (poison): see `producer dead list`" in done.stderr
    assert "b1: 1 request stays as it ended: Redis has no message of it" in done.stderr
    finish(lessee, lessee.pop(1))
    again = run_producer("retry", "b1", redis_url=redis_url).stderr
    assert "0 requests queued again" in again and "2 failed lines are wrong" in again


def test_retry_counts_lines_with_the_same_body(
    redis_url: str, tmp_path: Path, store: BatchStore
) -> None:
    same = [{"role": "user", "content": "x"}]
    lines = (chat_line(f"r{n}", messages=same, temperature=0) for n in range(3))
    path = write_lines(tmp_path / "in", lines)
    run_producer("submit", path, "--batch-id", "b1", "--dedupe", redis_url=redis_url)
    lessee = Lessee(client_of(store))
    finish(lessee, lessee.pop(1), ERROR)
    count = store.retry(now(store), ["failed"])
    finish(lessee, lessee.pop(1), ERROR)
    (text,) = unchanged_texts(store, now(store), ["failed"], count)
    assert text.startswith("3 requests have ended again already")


def test_retry_tells_what_was_queued_again_and_has_failed_again(store: BatchStore) -> None:
    submit_batch(store, 3)
    lessee = Lessee(client_of(store))
    finish(lessee, lessee.pop(), ERROR)
    count = store.retry(now(store), ["failed"])
    finish(lessee, lessee.pop(2), ERROR)
    (text,) = unchanged_texts(store, now(store), ["failed"], count)
    assert text.startswith("2 requests have ended again already")


def test_a_running_batch_stops_although_its_submitter_has_left(
    redis_url: str, tmp_path: Path, store: BatchStore
) -> None:
    path = batch_file(tmp_path / "in", 300)
    run_producer("submit", path, "--batch-id", "b1", "--stop-after-failures", "5%",
                 redis_url=redis_url)  # fmt: skip
    workers = [Lessee(client_of(store), f"w{n}") for n in range(4)]
    for lessee in workers:
        finish(lessee, lessee.pop(25), ERROR)
    assert workers[0].pop() == []
    assert eventually(lambda: now(store).finished, 5)
    assert counts(now(store)) == {"failed": 100, "cancelled": 200}
