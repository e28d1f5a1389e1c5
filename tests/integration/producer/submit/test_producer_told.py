"""What `submit` and `watch` say, what they refuse before anything is queued, how to go on."""

from __future__ import annotations

import datetime as dt
import gzip
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import orjson
import pytest
from kit.commands.doctor_findings import up_for_long
from kit.commands.runs import custom_ids
from kit.commands.submitting import assert_queued_once
from kit.commands.support import (
    batch_file,
    chat_line,
    finish,
    producer_command,
    producer_env,
    queued,
    run_all,
    run_producer,
    state,
    write_lines,
)
from kit.protocol.lessee import Lessee, client_of, submit_batch

from contract.redis import keys
from contract.redis.announcements import WORKER_SILENT_S
from contract.redis.batches import BatchStore
from demo.stack import eventually
from producer import queue_workers
from producer.cli import progress
from producer.queue_workers import QueueWorkers
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
    assert "the same command with --batch-id b1 queues the missing lines" in done.stderr
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
    assert (
        "the deadline 2020-01-01T00:00:00+00:00 has passed: on Redis's clock it is" in done.stderr
    )
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
        (["-o", "mine", "--batch-id", "b1"], "not what a collection of batch b1 wrote; name"),
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
        first = process.stderr.readline()
        assert first.startswith("b1: 0/3 done")
        assert "requests/s" not in first  # one read gives no rate
        run_all(store)
        eventually(lambda: process.poll() is not None, 20)
        assert process.returncode == 0


def announce(store: BatchStore, worker: str, state: str, silent_s: float = 0, **more: str) -> None:
    """Leave what a worker said of itself so many seconds ago."""
    if silent_s >= WORKER_SILENT_S:
        up_for_long(store)
    seconds, _ = client_of(store).time()
    record = b"%d\0" % ((seconds - silent_s) * 1000)
    told = {"state": state, "queue": "warmq"} | more
    client_of(store).hset(keys.WORKERS, worker, record + orjson.dumps(told))


@pytest.fixture
def workers(store: BatchStore) -> QueueWorkers:
    return QueueWorkers(store, "warmq")


def test_without_any_worker_nothing_more_is_known(workers: QueueWorkers):
    assert workers.text() == "no worker serves queue warmq"


def test_living_workers_are_told_with_their_states(store: BatchStore, workers: QueueWorkers):
    announce(store, "celery@a.12.0a1b2c3d", "ready")
    announce(store, "celery@b.c.13.0a1b2c3e", "starting")
    assert workers.text() in ("workers: ready, starting", "workers: starting, ready")


def test_a_worker_that_has_just_fallen_silent_is_told_by_name(
    store: BatchStore, workers: QueueWorkers
):
    announce(store, "celery@b.c.13.0a1b2c3e", "starting", silent_s=8)
    text = workers.text()
    assert text.startswith("workers: silent (celery@b.c (process 13) was last seen 0:00:0")


def test_the_first_overdue_announcement_of_a_worker_is_told(
    store: BatchStore, workers: QueueWorkers
):
    announce(store, "celery@b.c.13.0a1b2c3e", "ready", silent_s=3)
    text = workers.text()
    assert text.startswith("workers: silent (celery@b.c (process 13) was last seen 0:00:0")


def test_why_a_worker_runs_nothing_is_told(store: BatchStore, workers: QueueWorkers):
    announce(store, "celery@b.c.13.0a1b2c3e", "starting", why="waits for a:8000: no route to host")
    assert workers.text() == "workers: starting (waits for a:8000: no route to host)"
    announce(store, "celery@b.c.13.0a1b2c3e", "starting", silent_s=8, why="loading the model")
    assert workers.text().startswith("workers: silent (loading the model; celery@b.c (process 13")


def test_a_worker_that_ended_because_it_failed_is_not_alive_and_its_reason_is_told(
    store: BatchStore, workers: QueueWorkers
):
    announce(store, "celery@a.12.0a1b2c3d", "stopped", why="the engine failed to start: no\x1b GPU")
    text = workers.text()
    assert text.startswith("no worker serves queue warmq any more: the last one, celery@a (process")
    assert text.endswith("(stopped: the engine failed to start: no  GPU); see its log")
    assert store.workers("warmq") == []


def test_a_reason_is_shown_in_part_if_it_is_long(store: BatchStore, workers: QueueWorkers):
    announce(store, "celery@a.12.0a1b2c3d", "starting", why="x" * 10_000)
    assert len(workers.text()) < 400


def test_of_dead_workers_the_last_is_told_with_where_its_last_words_are(
    store: BatchStore, workers: QueueWorkers
):
    announce(store, "celery@a.12.0a1b2c3d", "ready", silent_s=300)
    announce(store, "celery@b.c.13.0a1b2c3e", "starting", silent_s=42)
    text = workers.text()
    assert text.startswith("no worker serves queue warmq any more: the last one, celery@b.c ")
    assert "(process 13), was seen 0:00:4" in text
    assert text.endswith("ago (starting); see its log")


def test_a_worker_whose_announcement_was_swept_is_remembered(
    store: BatchStore, workers: QueueWorkers, monkeypatch
):
    now = 1000.0
    monkeypatch.setattr(queue_workers.time, "monotonic", lambda: now)
    announce(store, "celery@a.12.0a1b2c3d", "starting")
    workers.text()
    client_of(store).delete(keys.WORKERS)
    now += 75
    text = workers.text()
    assert "celery@a (process 12), was seen 0:01:1" in text
    assert "(starting); see its log" in text


def test_who_watches_a_batch_of_a_dead_worker_is_told_so(redis_url: str, store: BatchStore):
    submit_batch(store, 2)
    announce(store, "celery@a.12.0a1b2c3d", "starting", silent_s=100)
    with subprocess.Popen(
        producer_command("watch", "b1"), env=producer_env(redis_url),
        stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stderr
        told = process.stderr.readline()
        process.kill()
        process.stderr.close()
    assert "0/2 done" in told
    assert "no worker serves queue warmq any more: the last one, celery@a (process 12)" in told


@pytest.mark.parametrize(("silent_s", "told"), [(8, "workers: silent (celery@a"), (-10, "")])
def test_who_watches_a_batch_that_still_has_a_rate_is_told_of_a_silent_worker(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    silent_s: float, told: str,
):  # fmt: skip
    submitted = submit_batch(store, 4)
    announce(store, "celery@a.12.0a1b2c3d", "ready", silent_s=silent_s)
    lessee = Lessee(client_of(store), "celery@a.12.0a1b2c3d")
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: finish(lessee, lessee.pop(2)))
    monkeypatch.setattr(progress, "time", clock)
    monkeypatch.setattr(progress, "PLAIN_EVERY_S", 0.0)
    progress.watch(store, submitted.batch)
    first, second, last = capsys.readouterr().err.splitlines()
    assert "workers: " in first
    assert "2/4 done" in second
    assert "requests/s" in second
    assert ("workers: " in second) == bool(told)
    assert told in second
    assert "workers: " not in last


def test_the_text_of_a_request_whose_worker_died_is_waited_for_with_a_word(
    redis_url: str, store: BatchStore
):
    submit_batch(store, 2)
    announce(store, "celery@a.12.0a1b2c3d", "ready", silent_s=100)
    with subprocess.Popen(
        producer_command("watch", "b1", "--request", "c1", "--stream"),
        env=producer_env(redis_url), stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stderr
        told = process.stderr.readline()
        process.kill()
        process.stderr.close()
    assert "c1 waits; no worker serves queue warmq any more" in told


def test_the_state_of_an_unfinished_batch_tells_of_the_workers(redis_url: str, store: BatchStore):
    submit_batch(store, 2)
    announce(store, "celery@a.12.0a1b2c3d", "starting", silent_s=100)
    shown = run_producer("status", "b1", redis_url=redis_url).stdout
    assert "workers   no worker serves queue warmq any more: the last one, celery@a" in shown
    announce(store, "celery@b.13.0a1b2c3e", "starting", silent_s=-14)  # not overdue for 16 s
    shown = run_producer("status", "b1", redis_url=redis_url).stdout
    assert "\nworkers   starting\n" in shown


def test_who_follows_results_that_do_not_come_is_told_of_the_workers(
    redis_url: str, store: BatchStore
):
    submit_batch(store, 2)
    announce(store, "celery@a.12.0a1b2c3d", "ready", silent_s=100)
    with subprocess.Popen(
        producer_command("results", "b1", "--follow"), env=producer_env(redis_url),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stderr
        told = process.stderr.readline()
        process.kill()
    assert "b1: 0 results, 0 failed; waiting, no worker serves queue warmq any more" in told


@pytest.mark.parametrize(
    ("url", "warned"),
    [("http://127.0.0.1:7399/hook", True), ("https://example.org/hook", False)],
)
def test_submit_names_the_setting_that_a_webhook_to_a_private_host_needs(
    redis_url: str, tmp_path: Path, url: str, warned: bool
):
    path = batch_file(tmp_path / "in", 2)
    done = run_producer("submit", path, "--notify", url, redis_url=redis_url)
    assert done.returncode == 0, done.stderr
    assert ("WARMQ_GATEWAY_PRIVATE_WEBHOOKS=true" in done.stderr) is warned
