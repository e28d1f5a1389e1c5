"""A bucket that does not tell whether an object is there: nothing is overwritten or done again."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest
from kit.commands.support import producer_command, producer_env, run_all, run_producer, write_lines
from kit.servers.s3 import Gate, credentials, s3_server, there
from kit.stacks.celery_side import simulated
from obstore.store import from_url

from contract.redis.batches import BatchStore
from producer import Client


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture
def gate(s3: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Give the server that the producer talks to; the bucket is empty."""
    with Gate(s3) as gate:
        for name, value in credentials(gate.url).items():
            monkeypatch.setenv(name, value)
        for name in there(s3):
            obstore.delete(from_url("s3://warmq"), name)
        yield gate


def read(gate: Gate, name: str) -> bytes:
    gate.refuses = 0
    return bytes(obstore.get(from_url("s3://warmq"), name).bytes())


def put(name: str, data: bytes) -> None:
    obstore.put(from_url("s3://warmq"), name, data)


def in_words(done: Any, name: str) -> None:
    assert done.returncode == 2, done.stderr
    assert f"it is not known whether s3://warmq/{name} exists" in done.stderr
    assert "s3:GetObject" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("status", [403, 503])
def test_results_replace_no_object_that_the_role_may_not_read(
    redis_url: str, store: BatchStore, gate: Gate, status: int
):
    with Client(redis_url) as client:
        client.submit([{"prompt": "x"}, {"prompt": 7.5}], batch_id="b1")
    run_all(store)
    put("out.jsonl", b"mine\n")
    put("out.errors.jsonl", b"mine too\n")
    gate.refuses = status
    args = ("results", "b1", "-o", "s3://warmq/out.jsonl")
    in_words(run_producer(*args, redis_url=redis_url), "out.jsonl")
    in_words(run_producer(*args, "--force", redis_url=redis_url), "out.errors.jsonl")
    assert read(gate, "out.jsonl") == b"mine\n"
    assert read(gate, "out.errors.jsonl") == b"mine too\n"


def test_a_submit_is_refused_before_anything_is_queued(
    redis_url: str, store: BatchStore, gate: Gate, tmp_path: Path
):
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "x"}])
    gate.refuses = 403
    args = ("submit", source, "-o", "s3://warmq/out.jsonl")
    in_words(run_producer(*args, redis_url=redis_url), "out.jsonl")
    in_words(run_producer(*args, "--force", redis_url=redis_url), "out.errors.jsonl")
    assert all(batch.is_run for batch in store.batches())


@pytest.mark.parametrize("status", [403, 503])
def test_a_run_that_is_complete_stays_so_where_its_object_cannot_be_asked_for(
    redis_url: str, store: BatchStore, gate: Gate, tmp_path: Path, status: int
):
    write_lines(tmp_path / "in.jsonl", ({"prompt": f"question {n}"} for n in range(700)))

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            producer_command("run", "in.jsonl", "s3://warmq/out.jsonl"),
            env=producer_env(redis_url), cwd=tmp_path, capture_output=True, text=True,
            timeout=50, check=False,
        )  # fmt: skip

    with simulated(redis_url, tmp_path / "worker.log"):
        assert run().returncode == 0
    (journal,) = tmp_path.glob("*.progress")
    before, answers = journal.read_bytes(), read(gate, "out.jsonl")
    gate.refuses = status
    in_words(run(), "out.jsonl")
    assert journal.read_bytes() == before
    assert not list(tmp_path.glob("*.lines"))
    assert all(batch.is_run for batch in store.batches())
    assert read(gate, "out.jsonl") == answers
    assert "was complete already, 700 results" in run().stderr


@pytest.mark.parametrize(
    ("out", "errors"),
    [("s3://warmq/out.jsonl", ()), ("out.parquet", ("--errors", "out.errors.parquet"))],
)
def test_an_error_file_that_no_run_has_left_is_not_replaced(
    redis_url: str, store: BatchStore, gate: Gate, tmp_path: Path, out: str, errors: tuple[str, ...]
):
    write_lines(tmp_path / "in.jsonl", [{"prompt": 7.5}])
    put("out.errors.jsonl", b"mine\n")
    (tmp_path / "out.errors.parquet").write_bytes(b"mine\n")
    done = subprocess.run(
        producer_command("run", "in.jsonl", out, *errors), env=producer_env(redis_url),
        cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    stem, dot, ending = out.rpartition(".")
    assert f"{stem}.errors{dot}{ending} exists; remove it, or name another" in done.stderr
    assert all(batch.is_run for batch in store.batches())
