"""What `submit` and `watch` say, what they refuse before anything is queued, how to go on."""

from __future__ import annotations

import datetime as dt
import gzip
import signal
import subprocess
from pathlib import Path

import orjson
import pytest
from kit.commands.runs import custom_ids
from kit.commands.submitting import assert_queued_once
from kit.commands.support import (
    batch_file,
    chat_line,
    producer_command,
    producer_env,
    queued,
    run_all,
    run_producer,
    state,
    write_lines,
)
from kit.protocol.lessee import submit_batch

from contract.redis.batches import BatchStore
from demo.stack import eventually
from producer.submit.submission import Submission

pytestmark = pytest.mark.timeout(120)


def test_a_cut_file_says_how_to_go_on_and_the_mended_one_completes_the_batch(
    redis_url: str, store: BatchStore, tmp_path: Path
):
    whole = gzip.compress(batch_file(tmp_path / "in", 1700).read_bytes())
    path = tmp_path / "in.gz"
    path.write_bytes(whole[: len(whole) * 2 // 3])
    done = run_producer("submit", path, "--batch-id", "b1", redis_url=redis_url)
    assert done.returncode == 2
    assert "the file is cut off, its compressed data ends too early" in done.stderr
    # How many lines it has is not told: the last ones that could be read are not among them
    assert "batch b1 has" not in done.stderr
    assert "the same command with --batch-id b1 queues what batch b1 does not have" in done.stderr
    assert "or `producer cancel b1`" in done.stderr
    path.write_bytes(whole)
    done = run_producer("submit", path, "--batch-id", "b1", redis_url=redis_url)
    assert done.returncode == 0, done.stderr
    assert_queued_once(store, 1700)


def test_fields_that_only_openai_has_are_told_once_and_not_queued(
    redis_url: str, store: BatchStore, tmp_path: Path
):
    lines = [chat_line("a", store=True, metadata={"x": "y"}), chat_line("b", store=False)]
    path = write_lines(tmp_path / "in", lines)
    done = run_producer("submit", path, "--set", "max_tokens=5", redis_url=redis_url)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("metadata (on 1 line), store (on 2 lines)") == 1
    bodies = [orjson.loads(message["body"])[0][0] for message in queued(store)]
    assert [sorted(body) for body in bodies] == [["max_tokens", "messages"]] * 2


def test_one_bad_line_is_told_as_one(redis_url: str, tmp_path: Path):
    path = write_lines(tmp_path / "in", [chat_line("a"), chat_line("b", max_tokens=0)])
    told = run_producer("submit", path, redis_url=redis_url).stderr
    assert ": 1 request queued in" in told
    assert ", 1 bad line (see" in told
    assert "field body.max_tokens: is below 1; give a whole number of at least 1" in told


def test_a_deadline_that_has_passed_is_refused_for_a_new_batch_only(
    redis_url: str, store: BatchStore, tmp_path: Path
):
    path = batch_file(tmp_path / "in", 3)
    words = ("submit", path, "--batch-id", "b1", "--deadline", "2020-01-01T00:00:00Z")
    done = run_producer(*words, redis_url=redis_url)
    assert (done.returncode, done.stdout, store.batches()) == (2, "", [])
    assert "the deadline 2020-01-01T00:00:00+00:00 has passed: on Redis' clock it is" in done.stderr
    # One whose submit began before its deadline may be completed after it
    moment = str(int(dt.datetime(2020, 1, 1, tzinfo=dt.UTC).timestamp() * 1000))
    Submission("b1", "warmq", 6, deadline=moment).create(store, str(path))
    done = run_producer(*words, redis_url=redis_url)
    assert done.returncode == 0, done.stderr
    assert state(store, "b1").number("total") == 3


@pytest.mark.parametrize(
    ("places", "problem"),
    [
        (["-o", "no/out"], "there is no folder"),
        (["-o", "."], "it is a folder; name a file in it"),
        (["-o", "out", "--errors", "no/bad"], "there is no folder"),
        (["--errors", "."], "it is a folder; name a file in it"),
        (["-o", "mine"], "mine exists; name another file, or replace it with --force"),
        (["-o", "mine", "--batch-id", "b1"], "is not an earlier collection of batch b1; name"),
        (["-o", "out", "--errors", "mine"], "or replace it with --force"),
    ],
    ids=" ".join,
)
def test_an_output_that_cannot_be_written_is_told_before_anything_is_queued(
    redis_url: str, store: BatchStore, tmp_path: Path, places: list[str], problem: str
):
    source, mine = batch_file(tmp_path / "in", 3), tmp_path / "mine"
    mine.write_text("mine\n")
    words = (word if word.startswith(("-", "b1")) else tmp_path / word for word in places)
    done = run_producer("submit", source, *words, redis_url=redis_url)
    assert (done.returncode, done.stdout, problem in done.stderr) == (2, "", True), done.stderr
    assert store.batches() == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "mine"]
    assert mine.read_text() == "mine\n"


def test_a_collection_replaces_an_earlier_one_of_its_batch_and_no_other(
    redis_url: str, store: BatchStore, tmp_path: Path
):
    lines = [chat_line("a"), chat_line("b", n=0)]
    for name in ("b1", "b2"):
        path = write_lines(tmp_path / "in", lines)
        run_producer("submit", path, "--batch-id", name, redis_url=redis_url)
    run_all(store)
    out = tmp_path / "out.jsonl"
    for _ in range(2):
        assert run_producer("results", "b1", "-o", out, redis_url=redis_url).returncode == 1
    # Also where the same submit does it again
    again = run_producer("submit", path, "--batch-id", "b1", "-o", out, redis_url=redis_url)
    assert again.returncode == 1, again.stderr
    for place in (out, tmp_path / "out.errors.jsonl"):
        before = place.read_bytes()
        other = run_producer("results", "b2", "-o", tmp_path / "2", "--errors", place,
                             redis_url=redis_url)  # fmt: skip
        assert (other.returncode, place.read_bytes()) == (2, before), other.stderr
    forced = run_producer("results", "b2", "-o", out, "--force", redis_url=redis_url)
    assert forced.returncode == 1
    assert custom_ids(out) == ["a"]


def test_an_interrupted_submit_with_an_output_names_the_command_that_writes_it(
    redis_url: str, store: BatchStore, tmp_path: Path
):
    out = tmp_path / "my answers.jsonl"
    with subprocess.Popen(
        producer_command("submit", batch_file(tmp_path / "in", 3), "--batch-id", "b1", "-o", out),
        env=producer_env(redis_url), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        while "0/3 done" not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGINT)
        told = process.communicate(timeout=30)[1]
    assert process.returncode == 130
    assert f"`producer results b1 -o '{out}' --follow` waits for its end" in told
    run_all(store)
    done = run_producer("results", "b1", "-o", out, "--follow", redis_url=redis_url)
    assert (done.returncode, custom_ids(out)) == (0, ["r0", "r1", "r2"])


def test_a_piped_watch_says_at_once_how_far_the_batch_is(redis_url: str, store: BatchStore):
    submit_batch(store, 3)
    with subprocess.Popen(
        producer_command("watch", "b1"), env=producer_env(redis_url),
        stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        # It is the first thing it says: what comes later would tell of results
        assert process.stderr.readline().startswith("b1: 0/3 done")
        run_all(store)
        eventually(lambda: process.poll() is not None, 20)
        assert process.returncode == 0
