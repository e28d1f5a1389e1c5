"""Hostile names and results on their way back: no crash, no other file, no terminal tricks."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import orjson
import pytest
import redis
from kit.commands.support import (
    batch_file,
    chat_line,
    producer_command,
    producer_env,
    run_all,
    run_producer,
    state,
    write_lines,
)
from kit.hostile.hostile import pickled
from kit.protocol.lessee import Lessee, bury_alive, celery_message, stored, submit_batch

from contract.redis import keys
from contract.redis.batches import BatchStore

#: Shared machines are slow at times; what waits here has deadlines of its own.
pytestmark = pytest.mark.timeout(200)


@pytest.mark.parametrize(
    "text", [b"\xff", b"\xed\xa0\x80", b"\xc0\x80", b"a\xe2\x82", b"\xf4\x90\x80\x80", b"\xf8\x88"]
)
def test_a_custom_id_that_is_no_text_does_not_spoil_the_result(
    redis_client: redis.Redis, store: BatchStore, text: bytes
):
    submitted = submit_batch(store, 1)
    raw = redis_client.lpop(submitted.list_key)
    hostile = raw.replace(b'"c1"', b'"' + text + b'"').replace(b'"deadline":null', b'"deadline":1')
    assert hostile.count(text) == 1
    redis_client.lpush(submitted.list_key, hostile)
    assert Lessee(redis_client).pop() == []
    meta = stored(redis_client, submitted.ids[0])
    assert meta is not None
    assert meta["warmq"]["custom_id"] is None
    assert meta["warmq"]["error"]["code"] == "expired"


@pytest.mark.parametrize("text", ["é", "€", "\U0001f600", "\ud7ff\ue000", "aß漢\U0010ffff"])
def test_a_custom_id_in_any_script_stays_what_it_is(
    redis_client: redis.Redis, store: BatchStore, text: str
):
    submitted = submit_batch(store, 1)
    raw = redis_client.lpop(submitted.list_key)
    named = raw.replace(b'"c1"', b'"' + text.encode() + b'"')
    redis_client.lpush(submitted.list_key, named.replace(b'"deadline":null', b'"deadline":1'))
    assert Lessee(redis_client).pop() == []
    assert stored(redis_client, submitted.ids[0])["warmq"]["custom_id"] == text  # type: ignore[index]


@pytest.mark.parametrize("order", ["input", "completion"])
def test_a_stored_result_that_is_garbage_is_one_error_line(
    redis_client: redis.Redis, redis_url: str, store: BatchStore, tmp_path: Path, order: str
):
    trap = tmp_path / "trap"
    submitted = submit_batch(store, 4)
    run_all(store)
    for rid, garbage in zip(
        submitted.ids, [pickled(str(trap)), b"[1]", b'{"status":5}'], strict=False
    ):
        redis_client.set(keys.result_key(rid), garbage)
    done = run_producer("results", submitted.id, "--order", order, redis_url=redis_url)
    assert done.returncode == 1, done.stderr
    found = sorted(map(orjson.loads, done.stdout.splitlines()), key=lambda line: line["custom_id"])
    assert [line["custom_id"] for line in found] == ["c1", "c2", "c3", "c4"]
    assert [(line["error"] or {}).get("code") for line in found] == ["request_failed"] * 3 + [None]
    assert (
        run_producer("status", submitted.id, "--request", "c1", redis_url=redis_url).returncode == 0
    )
    assert not trap.exists()


def test_custom_ids_like_paths_touch_no_file_but_the_one_asked_for(
    redis_url: str, store: BatchStore, tmp_path: Path
):
    folder = tmp_path / "deep" / "down"
    folder.mkdir(parents=True)
    odd = [
        "../../escaped",
        "/tmp/x\0y",
        "..",
        ".",
        "a\nb",
        "\0",
        "CON",
        "~",
        "$(touch x)",
        "x" * 512,
    ]
    lines = [chat_line(name) for name in odd]
    lines.append(chat_line("y" * 10_240))
    file = write_lines(tmp_path / "in", lines)
    assert run_producer("submit", file, "--batch-id", "b1", redis_url=redis_url).returncode == 0
    assert state(store, "b1").number("failed") == 1  # the 10 KB one is refused, by name
    run_all(store)
    before = set(tmp_path.rglob("*"))
    done = subprocess.run(
        producer_command("results", "b1", "-o", "out.jsonl"), env=producer_env(redis_url),
        cwd=folder, capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    found = [orjson.loads(line) for line in (folder / "out.jsonl").read_bytes().splitlines()]
    assert [line["custom_id"] for line in found] == odd
    new = set(tmp_path.rglob("*")) - before
    assert new == {folder / "out.jsonl", folder / "out.errors.jsonl"}


def test_control_characters_do_not_reach_the_terminal(
    redis_client: redis.Redis, redis_url: str, store: BatchStore, tmp_path: Path
):
    evil = "\x1b]0;owned\x07\x1b[2J\u202e"
    bad = {"custom_id": evil, "prompt": "x", evil: 1}
    file = write_lines(tmp_path / "in", [chat_line(evil), bad])
    shown = [run_producer("submit", file, "--batch-id", "b1", redis_url=redis_url)]
    message = celery_message("d", warmq={"custom_id": evil, "batch": evil})
    bury_alive(redis_client, message, reason=b"\x1b[2Jwhy")
    shown += [
        run_producer(*args, redis_url=redis_url)
        for args in (("dead", "list"), ("status", "b1"), ("status", "b1", "--request", evil))
    ]
    for done in shown:
        assert not {"\x1b", "\x07", "\u202e"} & set(done.stdout + done.stderr), done


@pytest.mark.parametrize("command", ["status", "results", "cancel", "watch", "delete"])
def test_an_argument_that_is_no_text_is_refused(redis_url: str, command: str):
    argv: list[str | bytes] = [*producer_command(command), b"\xff\xfe"]
    done = subprocess.run(
        argv, env=producer_env(redis_url), capture_output=True, timeout=50, check=False
    )
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr


def test_a_file_whose_name_is_no_text_is_submitted(
    redis_url: str, store: BatchStore, tmp_path: Path
):
    name = os.fsencode(tmp_path) + b"/in\xff"
    batch_file(tmp_path / "in", 2).rename(os.fsdecode(name))
    argv: list[str | bytes] = [*producer_command("submit", "--batch-id", "b1"), name]
    done = subprocess.run(
        argv, env=producer_env(redis_url), capture_output=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    assert state(store, "b1").number("total") == 2
