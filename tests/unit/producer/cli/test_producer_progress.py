"""Progress text: rates, time left, plain lines."""

from __future__ import annotations

import pytest

from contract.batch import Batch
from producer.cli import progress
from producer.cli.progress import FailureNews, Meter, SubmitPause, describe
from producer.queue_workers import QueueWorkers, clock_text, left_text


def batch(**counters: int) -> Batch:
    fields = {"created_at": "1000", "sealed": "1"} | {k: str(v) for k, v in counters.items()}
    return Batch("b1", fields)


def test_a_running_batch_is_told_with_rate_failures_and_time_left():
    text = describe(batch(total=500, completed=100, failed=2), 20.0, 400.4, left_s=20.0)
    assert text == "102/500 done, 2 failed, 20.0 requests/s, 400 tokens/s, ETA 0:00:20"


def test_cancelled_requests_are_not_done():
    cancelled = batch(total=5000, completed=965, failed=1, cancelled=4034)
    assert describe(cancelled, 0.0, 0.0).startswith("966/5000 done, 1 failed, 4034 cancelled")


def test_the_total_of_a_run_that_may_read_more_lines_is_marked():
    run = batch(windows=1, total=500, completed=100)
    assert describe(run, None, None) == "100/500+ done"
    read = batch(windows=1, total=500, completed=100, unread=0)
    assert describe(read, None, None) == "100/500 done"


def test_a_narrow_line_leaves_out_the_rates_and_keeps_the_time_left():
    running = batch(total=500, completed=100, failed=2)
    assert describe(running, 20.0, 400.4, width=60, left_s=20.0) == (
        "102/500 done, 2 failed, 20.0 requests/s, ETA 0:00:20"
    )
    assert (
        describe(running, 20.0, 400.4, width=40, left_s=20.0)
        == "102/500 done, 2 failed, ETA 0:00:20"
    )


@pytest.mark.parametrize("columns", [60, 80, 120, 160])
def test_a_terminal_of_any_width_shows_the_time_left(capsys, monkeypatch, columns: int):
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    running = batch(total=50_000, completed=12_345, failed=12)
    with Meter("batch_20261122224059_cc8df627b9d642aa", 50_000) as meter:
        meter.update(12_357, describe(running, 20.0, 400.4, width=meter.width, left_s=1882))
    told = capsys.readouterr().err
    assert "ETA 0:31:22" in told
    assert "27b9d642aa" in told


@pytest.mark.parametrize("columns", [80, 200])
def test_a_terminal_shows_the_whole_reason_why_nothing_runs(capsys, monkeypatch, columns: int):
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    reason = ", no worker; a worker has died: its {} requests wait for the end of their leases"
    with Meter("reviews", 5000) as meter:
        for count in (40, 41):
            meter.update(1384, "1384/5000 done", more=reason.format(count))
    told = " ".join(capsys.readouterr().err.split())
    assert "a worker has died: its 4" in told and "wait for the end of their leases" in told
    assert "reviews" in told and "1384/5000 done" in told and "…" not in told
    if columns == 80:  # one line for good; its numbers change
        assert told.count("has died") == 1


def test_a_batch_that_has_ended_before_has_no_rates():
    ended = batch(total=500, completed=499, failed=1, finished_at=2000)
    assert describe(ended, 0.0, 0.0) == "500/500 done, 1 failed"
    assert "20.0 requests/s" in describe(ended, 20.0, 0.0)


def test_rates_that_are_not_known_yet_are_left_out():
    running = batch(total=500, completed=100)
    assert describe(running, None, None, left_s=20.0) == "100/500 done, ETA 0:00:20"


def test_a_plain_line_that_has_not_changed_is_repeated_each_minute_only(capsys, monkeypatch):
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with Meter("b1") as meter:
        for _ in range(120):
            now += 1.0
            meter.update(0, "0 of 5 rows done" if now <= 115 else "1 of 5 rows done")
    told = capsys.readouterr().err.splitlines()
    assert told == ["b1: 0 of 5 rows done", "b1: 0 of 5 rows done", "b1: 1 of 5 rows done"]


def test_no_time_is_promised_where_none_is_known():
    assert "ETA" not in describe(batch(total=500), 0.0, 0.0)


def test_a_batch_still_being_submitted_says_so():
    unsealed = Batch("b1", {"created_at": "1", "total": "10", "cursor": "10"})
    assert "still being submitted (10 lines read)" in describe(unsealed, 5.0, 0.0)


def test_a_batch_that_gets_no_more_lines_says_since_when_and_what_completes_it(monkeypatch):
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    quiet = SubmitPause()
    fields = {"created_at": "1", "total": "10", "cursor": "10", "completed": "10"}
    assert quiet.add(Batch("b1", fields)) == 0
    now = 8.0
    assert quiet.add(Batch("b1", fields | {"cursor": "20"})) == 0
    now = 43.0
    text = describe(
        Batch("b1", fields), 0.0, 0.0, quiet.add(Batch("b1", fields | {"cursor": "20"}))
    )
    assert "10/10 done" in text
    assert "not submitted to its end (10 lines read, no more for 0:00:35)" in text
    assert "fix the file if it was refused" in text
    assert "the same command with --batch-id b1 queues the missing lines" in text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00:00"), (59.6, "0:01:00"), (3725, "1:02:05")]
)
def test_durations_read_like_a_clock(seconds: float, text: str):
    assert clock_text(seconds) == text


def test_a_time_left_is_never_nothing():
    assert [left_text(seconds) for seconds in (-1.0, 0.2, 2.4)] == ["0:00:01", "0:00:01", "0:00:02"]
    assert describe(batch(total=5, completed=4), 2.0, 0.0, left_s=0.1).endswith("ETA 0:00:01")


def test_without_a_terminal_lines_come_at_intervals_on_stderr(capsys, monkeypatch):
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with Meter("b1", 10) as meter:
        meter.update(1, "1 done")
        now = 5.0
        meter.update(2, "2 done")
        meter.update(3, "3 done")
    captured = capsys.readouterr()
    assert captured.err == "b1: 2 done\n"
    assert captured.out == ""


def test_on_a_terminal_a_bar_is_drawn_on_stderr(capsys, monkeypatch):
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with Meter("b1", 10) as meter:
        meter.update(5, "5/10 done [x]")
    captured = capsys.readouterr()
    assert "5/10 done [x]" in captured.err
    assert captured.out == ""


def test_failures_are_told_from_ten_ended_requests():
    news = FailureNews()
    failing = {"failures": "invalid_request 9"}
    for ended, told in ((9, False), (10, True)):
        found = batch(total=500, failed=9, completed=ended - 9)
        assert bool(news.add(Batch("b1", found.fields | failing))) is told


def test_a_worker_that_was_just_started_is_not_missing():
    class Nobody:
        def announcements(self, queue: str) -> list[dict[str, object]]:
            return []

    assert QueueWorkers(Nobody(), "warmq", starting=True).text() == "the worker starts"
