"""A run is read as one batch: its record with the windows that Redis has."""

from __future__ import annotations

from contract.batch import Batch
from contract.failures import failures_of, failures_text
from contract.runs import joined


def batch(name: str, **fields: object) -> Batch:
    return Batch(name, {"created_at": "1", "queue": "q", **{n: str(v) for n, v in fields.items()}})


RECORD = batch(
    "run_1", windows=1, sealed=1, cursor=500, total=500, completed=497, failed=3,
    failures="broken 3 a b", prompt_tokens=10,
)  # fmt: skip


def test_a_run_has_the_counts_of_its_record_and_its_windows() -> None:
    window = batch(
        "run_1.1", cursor=1000, total=500, completed=7, failed=2, cancelled=1,
        failures="broken 1 c\nother 1 d", prompt_tokens=5, sealed=1,
    )  # fmt: skip
    run = joined(RECORD, [window])
    assert (run.id, run.is_run, run.windows, run.parts) == ("run_1", True, (window,), (window,))
    assert (run.done, run.terminal, run.number("total")) == (509, 510, 1000)
    assert (run.number("cursor"), run.number("prompt_tokens")) == (1000, 15)
    assert [(one.code, one.count) for one in failures_of([run])] == [("broken", 4), ("other", 1)]
    assert (run.status, run.queues, run.dedupe) == ("in_progress", ["q"], False)
    # Cancelled requests did not run, so they are no part of a share of failures
    assert failures_text(run) == "5 of 509 failed: 4 broken, 1 other"


def test_a_cancelled_run_has_ended_when_its_windows_have() -> None:
    record = batch("run_1", windows=0, sealed=1, cancelling=1, finished_at=9)
    assert joined(record, [batch("run_1.0", total=5)]).status == "cancelling"
    ended = batch("run_1.0", total=5, cancelled=5, finished_at=9, cancelling=1)
    assert joined(record, [ended]).status == "cancelled"


def test_a_run_says_why_its_window_was_stopped() -> None:
    stopped = batch("run_1.1", stopped="open", cancelling=1, reason="stopped: 2 of 3")
    run = joined(RECORD, [stopped])
    assert (run.fields["reason"], run.status) == ("stopped: 2 of 3", "in_progress")


def test_a_stopped_run_has_ended_like_a_stopped_batch_until_it_goes_on() -> None:
    fields = {"windows": 1, "sealed": 1, "reason": "stopped: 2 of 3", "stopped_at": 7}
    window = batch("run_1.1", stopped="sealed", cancelling=1, reason="stopped: 2 of 3", total=3)
    running = joined(batch("run_1", **fields), [window])
    assert (running.status, running.stopped) == ("cancelling", True)
    ended = joined(batch("run_1", **fields), [batch("run_1.1", finished_at=9)])
    assert (ended.status, ended.stopped, ended.number("finished_at")) == ("cancelled", True, 9)
    assert ended.fields["reason"] == "stopped: 2 of 3"
    alone = joined(batch("run_1", **fields), [])
    assert (alone.status, alone.number("finished_at")) == ("cancelled", 7)
    open_again = joined(batch("run_1", **fields | {"reason": "", "stopped_at": ""}), [])
    assert (open_again.status, open_again.stopped) == ("in_progress", False)
    by_user = joined(batch("run_1", **fields, cancelling=1, finished_at=8), [])
    assert (by_user.status, by_user.stopped, by_user.number("finished_at")) == (
        "cancelled", False, 8
    )  # fmt: skip


def test_a_run_of_several_models_has_the_queues_of_its_windows() -> None:
    assert joined(RECORD, [batch("run_1.1", queues="q.a\nq.b")]).queues == ["q.a", "q.b"]


def test_another_batch_is_its_own_part() -> None:
    other = batch("b1", total=3)
    assert (other.is_run, other.parts) == (False, (other,))


def test_a_run_has_the_known_answers_of_its_windows() -> None:
    run = joined(batch("run_1", windows=1, cached=4), [batch("run_1.1", total=5, cached=5)])
    assert run.number("cached") == 9
