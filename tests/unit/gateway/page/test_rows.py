"""A batch's row on the page."""

from __future__ import annotations

import orjson
import pytest

from contract.batch import Batch
from contract.redis.objects import Stored
from contract.redis.pace import Pace
from gateway.batches.api.record import BatchRecord, RequestCounts, encode
from gateway.page.batches import row_of
from gateway.page.estimates import estimates
from gateway.page.summary import summary
from gateway.redis.batch_views import BatchView
from producer.over_http import _with_times
from producer.stalls import no_worker_stall
from producer.time_left import Outlook

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


@pytest.mark.parametrize("took_ms", [29, 500, 2031])
def test_the_page_has_the_rate_and_the_time_that_the_commands_have(took_ms: int) -> None:
    batch = Batch("b1", FIELDS | {"finished_at": str(1000 + took_ms)})
    row = row_of(BatchView("b1", batch, []), 20.0)
    assert row is not None
    assert (row["seconds"], row["rate"]) == (batch.seconds, batch.rate)
    assert row["seconds"] == took_ms / 1000


@pytest.mark.parametrize(("began", "ended", "seconds"), [(7, 7, 1.0), (7, 10, 3.0)])
def test_a_batch_over_http_has_the_rate_and_the_time_that_the_commands_have(
    began: int, ended: int, seconds: float
) -> None:
    record = BatchRecord(
        id="batch_1", tenant="t", endpoint="/v1/chat/completions", input_file_id="file-1",
        completion_window="24h", created_at=5, expires_at=99, status="completed",
        changed_at={"in_progress": began, "completed": ended}, counts=RequestCounts(500, 500),
    )  # fmt: skip
    document = encode(record)
    row = row_of(BatchView("batch_1", Stored("batch_1", document, 1), []), 20.0)
    queued = FIELDS | {"completed": "500", "failed": "0", "finished_at": "1124"}
    shown = _with_times(Batch("batch_1", queued), orjson.loads(document))
    assert row is not None
    assert (row["seconds"], row["rate"]) == (seconds, 500 / seconds)
    assert (shown.shown_s, shown.rate) == (seconds, 500 / seconds)
    assert shown.seconds == ended - began


def test_a_retried_batch_has_no_mean_rate_and_no_time() -> None:
    retried = Batch("b1", FIELDS | {"retried": "3"})
    row = row_of(BatchView("b1", retried, []), 20.0)
    assert row is not None
    assert (row["rate"], retried.rate, row["seconds"]) == (None, None, None)


def test_the_row_of_a_run_that_may_read_more_lines_is_marked() -> None:
    running = {name: FIELDS[name] for name in FIELDS if name not in ("finished_at", "cancelling")}
    marks = {}
    for unread in ("", "7", "0"):
        run = Batch("run_1", running | {"windows": "1", "unread": unread})
        row = row_of(BatchView("run_1", run, []), 20.0)
        assert row is not None
        marks[unread] = row["grows"]
    assert marks == {"": True, "7": True, "0": False}
    row = row_of(BatchView("b1", Batch("b1", running), []), 20.0)
    assert row is not None and not row["grows"]


def test_a_batch_that_waits_for_its_first_worker_does_not_run():
    row = {"ended": False, "queues": [], "id": "b1", "failures": [], "ended_at": None}
    row |= {"left_s": None, "done": 0, "total": 0, "waits_for_run": False}
    (part,) = summary([row], [no_worker_stall(1)], 0.0)
    assert part.text == "1 batch waits for a worker."


def test_a_run_whose_queued_requests_have_ended_does_not_run() -> None:
    fields = {name: FIELDS[name] for name in FIELDS if name not in ("finished_at", "cancelling")}
    fields |= {"prompt_tokens": "90"}
    rows = []
    for completed in ("2", "3"):
        run = Batch("run_1", fields | {"windows": "1", "unread": "70", "completed": completed})
        row = row_of(BatchView("run_1", run, []), 20.0)
        assert row is not None
        row |= estimates(row, {"warmq": Outlook(Pace(1.0, 1, 9.0))})
        rows.append(row)
    running, waiting = rows
    assert (running["waits_for_run"], waiting["waits_for_run"]) == (False, True)
    assert running["left_s"] and waiting["left_s"] is None
    texts = [one.text.format(**one.fields) for one in summary([waiting], [], 0.0)[:2]]
    assert texts[0] == "No batch runs."
    assert texts[1].startswith("1 run has done what it has queued.")
    texts = [one.text for one in summary([running, waiting, waiting], [], 0.0)[:2]]
    assert texts[0] == "1 batch runs, done about {at}."
    assert texts[1].startswith("{n} runs have done")
