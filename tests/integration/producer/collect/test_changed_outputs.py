"""`results -o` and `submit -o` replace what they wrote last, and nothing that somebody changed."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kit.commands.bucket_objects import put, read
from kit.commands.support import (
    chat_line,
    producer_command,
    producer_env,
    run_all,
    run_producer,
    state,
    write_lines,
)
from kit.protocol.lessee import submit_batch

from contract.redis.batches import BatchStore
from demo.stack import RedisServer, eventually

CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "a text was edited": lambda whole: whole.replace(b'"custom_id":"', b'"custom_id":"!', 1),
    "a letter was exchanged": lambda whole: whole[:-9] + b"X" + whole[-8:],
    "a line was exchanged": lambda whole: b"{}\n" + whole.partition(b"\n")[2],
    "a line was appended": lambda whole: whole + b'{"note": 1}\n',
    "a line of its own was appended": lambda whole: whole + whole.partition(b"\n")[0] + b"\n",
    "a line was taken away": lambda whole: whole.partition(b"\n")[2],
    "it was cut off": lambda whole: whole[:-20],
    "an end of line was appended": lambda whole: whole + b"\n",
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_changed_file_is_refused_by_name_and_left(
    redis_url: str, store: BatchStore, tmp_path: Path, how: str
):
    # Given two files that were collected
    source, out = tmp_path / "in", tmp_path / "out.jsonl"
    write_lines(source, [*map(chat_line, "ab"), *(chat_line(one, n=0) for one in "cd")])
    run_producer("submit", source, "--batch-id", "b1", redis_url=redis_url)
    run_all(store)
    collect = ("results", "b1", "-o", out)
    assert run_producer(*collect, redis_url=redis_url).returncode == 1
    for path in (out, tmp_path / "out.errors.jsonl"):
        # When one of them changes
        whole = path.read_bytes()
        changed = CHANGES[how](whole)
        path.write_bytes(changed)
        # Then it stays so, and the command says what to do
        done = run_producer(*collect, redis_url=redis_url)
        assert done.returncode == 2, done.stderr
        assert f"{path} exists, and its content is not" in done.stderr
        assert "name another file, or replace it with --force" in done.stderr
        assert path.read_bytes() == changed
        path.write_bytes(whole)
    # And what is as it was may be written again
    assert run_producer(*collect, redis_url=redis_url).returncode == 1


def test_a_submit_that_is_repeated_leaves_what_was_changed_unless_forced(
    redis_url: str, store: BatchStore, tmp_path: Path
):
    source, out = tmp_path / "in", tmp_path / "out.jsonl"
    write_lines(source, [chat_line("a"), chat_line("b")])
    submit = ("submit", source, "--batch-id", "b1")
    run_producer(*submit, redis_url=redis_url)
    run_all(store)
    for _ in range(2):
        assert run_producer(*submit, "-o", out, redis_url=redis_url).returncode == 0
    with out.open("ab") as file:
        file.write(b"mine\n")
    done = run_producer(*submit, "-o", out, redis_url=redis_url)
    assert (done.returncode, out.read_bytes()[-5:]) == (2, b"mine\n"), done.stderr
    assert f"{out} exists, and its content is not" in done.stderr
    assert run_producer(*submit, "-o", out, "--force", redis_url=redis_url).returncode == 0
    assert run_producer(*submit, "-o", out, redis_url=redis_url).returncode == 0


def test_a_partial_collection_is_replaced_by_a_later_one(
    redis_url: str, store: BatchStore, tmp_path: Path
):
    submit_batch(store, 3)
    out = tmp_path / "out.jsonl"
    args = ("results", "b1", "-o", out)
    assert run_producer(*args, "--partial", redis_url=redis_url).returncode == 0
    run_all(store)
    for count in (3, 3):
        assert run_producer(*args, redis_url=redis_url).returncode == 0
        assert out.read_bytes().count(b"\n") == count


def test_what_appears_while_results_are_waited_for_is_left(
    redis_url: str, store: BatchStore, tmp_path: Path
):
    submit_batch(store, 3)
    out = tmp_path / "out.jsonl"
    with subprocess.Popen(
        producer_command("results", "b1", "-o", out, "--follow"), env=producer_env(redis_url),
        stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        eventually(lambda: list(tmp_path.glob(".out.jsonl.*.part")), 30, "it waits")
        out.write_bytes(b"mine\n")
        run_all(store)
        told = process.communicate(timeout=60)[1]
    assert (process.returncode, f"{out} exists" in told) == (2, True), told
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
    assert out.read_bytes() == b"mine\n"


def test_where_no_note_can_be_taken_results_are_written_and_then_left(
    own: RedisServer, own_store: BatchStore, tmp_path: Path
):
    submit_batch(own_store, 2)
    run_all(own_store)
    rules = "on >pw ~* &* +@read +@connection +@scripting -evalsha -eval"
    own.client().execute_command("ACL", "SETUSER", "reader", *rules.split())
    out = tmp_path / "out.jsonl"
    url = own.url.replace("redis://", "redis://reader:pw@")
    first = run_producer("results", "b1", "-o", out, redis_url=url)
    assert first.returncode == 0, first.stderr
    again = run_producer("results", "b1", "-o", out, redis_url=own.url)
    assert (again.returncode, "--force" in again.stderr) == (2, True), again.stderr


@pytest.mark.usefixtures("bucket_environment")
@pytest.mark.parametrize("where", ["s3://warmq/out.jsonl", "s3://warmq/out.parquet", "out.parquet"])
def test_an_object_and_a_table_are_known_again_as_a_whole(
    redis_url: str, store: BatchStore, tmp_path: Path, bucket: Any, where: str
):
    submit_batch(store, 3)
    run_all(store)
    local = tmp_path / where
    name = where.rpartition("/")[2]
    out: Any = where if "://" in where else local
    args = ("results", "b1", "-o", out)
    for _ in range(2):
        done = run_producer(*args, redis_url=redis_url)
        assert done.returncode == 0, done.stderr
    whole = read(bucket, name) if out is where else local.read_bytes()
    changed = whole[:-30] + b"X" + whole[-29:]  # of the same size, far behind the first line
    if out is where:
        put(bucket, name, changed)
    else:
        local.write_bytes(changed)
    done = run_producer(*args, redis_url=redis_url)
    assert done.returncode == 2, done.stderr
    assert f"{out} exists, and its content is not" in done.stderr
    assert (read(bucket, name) if out is where else local.read_bytes()) == changed


def test_only_the_latest_marks_are_kept(redis_url: str, store: BatchStore, tmp_path: Path):
    submit_batch(store, 1)
    batch = state(store, "b1")
    for number in range(40):
        store.note_written(batch, [f"{number}-a", f"{number}-b"])
    assert len(state(store, "b1").written) == 16
    assert {"39-a", "39-b", "32-a"} <= state(store, "b1").written
