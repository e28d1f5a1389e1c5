"""A batch's row on the page."""

from __future__ import annotations

from contract.batch import Batch
from gateway.page.batches import row_of
from gateway.page.summary import summary
from gateway.redis.batch_views import BatchView
from producer.stalls import no_worker_stall

FIELDS = {
    "created_at": "1000", "finished_at": "11000", "sealed": "1", "queue": "warmq",
    "total": "10", "terminal": "10", "completed": "3", "failed": "1", "cancelled": "4",
    "expired": "2", "cancelling": "by the user",
}  # fmt: skip


def test_failed_requests_are_those_of_the_command_without_cancelled_and_expired_ones():
    row = row_of(BatchView("b1", Batch("b1", FIELDS), []), 20.0)
    assert row is not None
    counted = [row[name] for name in ("completed", "failed", "cancelled", "expired", "done")]
    assert counted == [3, 1, 4, 2, 4]


def test_lines_that_known_answers_answered_are_counted():
    for fields, count in ((FIELDS, 0), (FIELDS | {"cached": "2"}, 2)):
        row = row_of(BatchView("b1", Batch("b1", fields), []), 20.0)
        assert row is not None and row["reused"] == count


def test_a_running_batch_has_its_mean_rate_so_far():
    fields = {name: FIELDS[name] for name in FIELDS if name not in ("finished_at", "cancelling")}
    row = row_of(BatchView("b1", Batch("b1", fields), []), 17.0)
    assert row is not None
    assert (row["ended"], row["rate"]) == (False, 4 / 16)


def test_a_batch_that_waits_for_its_first_worker_does_not_run():
    row = {"ended": False, "queues": [], "id": "b1", "failures": [], "ended_at": None}
    (part,) = summary([row | {"left_s": None, "done": 0, "total": 0}], [no_worker_stall(1)], 0.0)
    assert part.text == "1 batch waits for a worker."
