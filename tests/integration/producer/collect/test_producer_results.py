"""Collecting results: both orders, following, files that are whole or not there."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from kit.commands.support import (
    batch_file,
    finish,
    producer_command,
    producer_env,
    run_producer,
    state,
)
from kit.protocol.lessee import Lessee, client_of, submit_batch

from contract import naming
from contract.errors import RequestFailed
from contract.redis import keys
from contract.redis.batches import BatchStore
from demo.stack import eventually
from producer.batch_watch import BatchChanged
from producer.collect.collect import Collector
from producer.collect.outputs import error_file_of, exists


def collect(store: BatchStore, order: str = "input", batch_id: str = "b1") -> list[dict[str, Any]]:
    """Return what a batch has now."""
    return [
        orjson.loads(r.json)
        for r in Collector(store, state(store, batch_id), follow=False).lines(order)
    ]


def custom_ids(lines: list[dict[str, Any]]) -> list[str]:
    return [line["custom_id"] for line in lines]


def finish_out_of_order(store: BatchStore) -> None:
    """Finish b1 with c1, c2, c3: c3 first, then c1 as a failure, then c2."""
    submit_batch(store, 3)
    lessee = Lessee(client_of(store))
    one, two, three = lessee.pop()
    finish(lessee, [three])
    finish(lessee, [one], RequestFailed("the engine choked"))
    finish(lessee, [two])


def test_results_come_in_input_order_or_as_they_were_completed(store: BatchStore):
    finish_out_of_order(store)
    assert custom_ids(collect(store, "input")) == ["c1", "c2", "c3"]
    assert custom_ids(collect(store, "completion")) == ["c3", "c1", "c2"]


def test_a_result_is_an_openai_batch_output_line(store: BatchStore):
    finish_out_of_order(store)
    failed, answered, _ = collect(store)
    request_id = naming.request_id("b1", "c2")
    assert answered["id"] == f"batch_req_{request_id}"
    assert answered["error"] is None
    assert answered["response"]["status_code"] == 200
    body = answered["response"]["body"]
    assert body["choices"][0]["message"]["content"] == "answer to c2"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["total_tokens"] == 5
    assert failed["response"] is None
    assert failed["error"]["code"] == "request_failed"
    assert failed["error"]["message"] == "the engine choked"


@pytest.mark.parametrize("order", ["input", "completion"])
def test_lost_results_are_lines_so_that_none_is_missing(store: BatchStore, order: str):
    finish_out_of_order(store)
    client_of(store).delete(keys.result_key(naming.request_id("b1", "c2")))
    lines = collect(store, order)
    assert sorted(custom_ids(lines)) == ["c1", "c2", "c3"]
    (lost,) = [line for line in lines if line["custom_id"] == "c2"]
    assert lost["error"]["code"] == "result_expired"


def test_a_retried_request_is_given_once_in_completion_order(store: BatchStore):
    finish_out_of_order(store)
    assert store.retry(state(store, "b1"), ["failed"]) == 1
    lessee = Lessee(client_of(store))
    finish(lessee, lessee.pop())

    lines = collect(store, "completion")

    assert sorted(custom_ids(lines)) == ["c1", "c2", "c3"]
    assert all(line["error"] is None for line in lines)


@pytest.mark.parametrize("order", ["input", "completion"])
def test_of_an_unfinished_batch_partial_gives_what_is_there(
    redis_url: str, store: BatchStore, order: str
):
    submit_batch(store, 3)
    lessee = Lessee(client_of(store))
    finish(lessee, lessee.pop()[1:])

    refused = run_producer("results", "b1", "--order", order, redis_url=redis_url)
    given = run_producer("results", "b1", "--order", order, "--partial", redis_url=redis_url)

    assert refused.returncode == 2
    assert "--follow waits for it, --partial collects the results so far" in refused.stderr
    assert refused.stdout == ""
    assert given.returncode == 0
    lines = [orjson.loads(line) for line in given.stdout.splitlines()]
    assert custom_ids(lines) == ["c2", "c3"]


def following(store: BatchStore, order: str) -> Iterator[str]:
    """Yield custom_ids as they come while following; whoever waits too long fails."""
    patience = 200

    def no_sleep(_: float) -> None:
        nonlocal patience
        patience -= 1
        assert patience, "it waits for something that will not come"

    for line in Collector(store, state(store, "b1"), follow=True, sleep=no_sleep).lines(order):
        yield orjson.loads(line.json)["custom_id"]


def test_followed_results_come_as_soon_as_they_are_there(store: BatchStore):
    submit_batch(store, 3)
    lessee = Lessee(client_of(store))
    one, two, three = lessee.pop()

    completion = following(store, "completion")
    finish(lessee, [two])
    assert next(completion) == "c2"
    finish(lessee, [three])
    assert next(completion) == "c3"
    finish(lessee, [one])
    assert list(completion) == ["c1"]


def test_followed_results_in_input_order_wait_for_the_next_in_order(store: BatchStore):
    submit_batch(store, 3)
    lessee = Lessee(client_of(store))
    one, two, three = lessee.pop()

    in_order = following(store, "input")
    finish(lessee, [one])
    assert next(in_order) == "c1"
    finish(lessee, [three])
    with pytest.raises(AssertionError, match="it waits"):
        next(in_order)  # c3 is there, c2 is next
    finish(lessee, [two])
    assert list(following(store, "input")) == ["c1", "c2", "c3"]


def test_following_goes_on_while_lines_are_still_submitted(store: BatchStore):
    submitted = submit_batch(store, 2, seal=False)
    lessee = Lessee(client_of(store))
    followed = following(store, "input")
    finish(lessee, lessee.pop())
    assert [next(followed), next(followed)] == ["c1", "c2"]
    assert store.seal(submitted.batch, submitted.end).answer == "ok"
    assert list(followed) == []


def test_a_batch_that_is_deleted_meanwhile_ends_the_following(store: BatchStore):
    submit_batch(store, 2)
    lessee = Lessee(client_of(store))
    leases = lessee.pop()
    followed = following(store, "completion")
    finish(lessee, leases[:1])
    next(followed)
    finish(lessee, leases[1:])
    assert store.delete("b1")
    with pytest.raises(BatchChanged, match="deleted"):
        next(followed)


def test_failed_requests_go_to_the_error_file(redis_url: str, store: BatchStore, tmp_path: Path):
    finish_out_of_order(store)
    out, errors = tmp_path / "out.jsonl", tmp_path / "bad.jsonl"

    done = run_producer("results", "b1", "-o", out, "--errors", errors, redis_url=redis_url)

    assert done.returncode == 1
    assert custom_ids([orjson.loads(x) for x in out.read_bytes().splitlines()]) == ["c2", "c3"]
    assert custom_ids([orjson.loads(x) for x in errors.read_bytes().splitlines()]) == ["c1"]
    assert done.stdout == ""


def test_without_an_error_file_named_one_lies_beside_the_output(
    redis_url: str, store: BatchStore, tmp_path: Path
):
    finish_out_of_order(store)
    done = run_producer("results", "b1", "-o", tmp_path / "out.jsonl", redis_url=redis_url)
    assert done.returncode == 1
    assert "out.errors.jsonl" in done.stderr
    assert (tmp_path / "out.errors.jsonl").read_bytes().count(b"\n") == 1


def test_without_failures_there_is_no_error_file_and_an_old_one_is_emptied(
    redis_url: str, store: BatchStore, tmp_path: Path
):
    submit_batch(store, 2)
    lessee = Lessee(client_of(store))
    finish(lessee, lessee.pop())
    out, old = tmp_path / "out.jsonl", tmp_path / "other.errors.jsonl"
    old.write_text("stale\n")

    assert run_producer("results", "b1", "-o", out, redis_url=redis_url).returncode == 0
    assert not exists(error_file_of(str(out)))
    other = tmp_path / "other.jsonl"
    assert run_producer("results", "b1", "-o", other, redis_url=redis_url).returncode == 2
    forced = run_producer("results", "b1", "-o", other, "--force", redis_url=redis_url)
    assert forced.returncode == 0
    assert old.read_text() == ""


def test_on_stdout_all_lines_come_unless_an_error_file_is_named(
    redis_url: str, store: BatchStore, tmp_path: Path
):
    finish_out_of_order(store)
    together = run_producer("results", "b1", redis_url=redis_url)
    apart = run_producer("results", "b1", "--errors", tmp_path / "bad", redis_url=redis_url)
    assert together.stdout.count("\n") == 3
    assert apart.stdout.count("\n") == 2
    assert (together.returncode, apart.returncode) == (1, 1)


def test_one_file_for_both_is_refused(redis_url: str, store: BatchStore, tmp_path: Path):
    out = tmp_path / "out"
    done = run_producer("results", "b1", "-o", out, "--errors", out, redis_url=redis_url)
    assert done.returncode == 2
    assert "same file" in done.stderr


@pytest.mark.parametrize(
    ("sig", "status"), [(signal.SIGKILL, -9), (signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_an_interrupted_collection_leaves_no_half_file(
    redis_url: str, store: BatchStore, tmp_path: Path, sig: signal.Signals, status: int
):
    submit_batch(store, 3)
    lessee = Lessee(client_of(store))
    finish(lessee, lessee.pop()[:2])
    out = tmp_path / "out.jsonl"
    out.write_text("an earlier collection\n")

    with subprocess.Popen(
        producer_command("results", "b1", "-o", out, "--follow", "--force"),
        env=producer_env(redis_url), stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        eventually(lambda: len(os.listdir(tmp_path)) == 2, 30)  # noqa: PTH208 - a name is enough
        process.send_signal(sig)
        told = process.communicate()[1]

    assert process.returncode == status
    assert out.read_text() == "an earlier collection\n"
    assert "Traceback" not in told
    if sig is not signal.SIGKILL:
        assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_results_of_a_real_submit_can_be_followed_to_a_file(
    redis_url: str, store: BatchStore, tmp_path: Path
):
    path, out = batch_file(tmp_path / "in", 1200), tmp_path / "out.jsonl"
    with subprocess.Popen(
        producer_command("submit", path, "--batch-id", "b1", "-o", out),
        env=producer_env(redis_url), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        lessee = Lessee(client_of(store))
        eventually(lambda: (b := store.batch("b1")) and b.sealed, 30)
        while leases := lessee.pop(500):
            finish(lessee, leases)
        printed, told = process.communicate()
    assert process.returncode == 0, told
    assert printed == "b1\n"
    lines = [orjson.loads(line) for line in out.read_bytes().splitlines()]
    assert custom_ids(lines) == [f"r{i}" for i in range(1200)]
