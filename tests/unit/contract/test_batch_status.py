"""The status of a batch is the same in the API, on the page and in the commands."""

from __future__ import annotations

import pytest

from contract.batch import Batch

ENDED = {"created_at": "1", "sealed": "1", "finished_at": "9", "total": "2"}


@pytest.mark.parametrize(("fields", "status"), [
    ({"valid": "2", "completed": "2"}, "completed"),
    ({"valid": "2", "failed": "2"}, "completed"),
    ({"failed": "2"}, "failed"),
    ({"failed": "2", "over_http": "1"}, "completed"),
    ({"valid": "2", "completed": "1", "expired": "1"}, "expired"),
])  # fmt: skip
def test_the_status_of_an_ended_batch_is_openais(fields: dict[str, str], status: str) -> None:
    assert Batch("b", ENDED | fields).status == status


@pytest.mark.parametrize(("fields", "grows"), [
    ({}, True),
    ({"unread": ""}, True),
    ({"unread": "1"}, True),
    ({"unread": "0"}, False),
    ({"unread": "7", "finished_at": "9"}, False),
    # What was queued after the collected windows is deleted
    ({"unread": "0", "cancelling": "1", "stopped": "sealed", "finished_at": "9"}, True),
])  # fmt: skip
def test_a_run_may_grow_until_its_file_is_read_to_the_end(
    fields: dict[str, str], grows: bool
) -> None:
    run = {"created_at": "1", "sealed": "1", "windows": "0", "total": "2"}
    assert Batch("run_1", run | fields).may_grow is grows
    assert not Batch("b", {"created_at": "1", "total": "2"}).may_grow


@pytest.mark.parametrize(("fields", "status", "complete"), [
    ({}, "completed", True),
    ({"cancelling": "1"}, "cancelled", False),
    ({"cancelling": "1", "unread": "7"}, "cancelled", False),
    ({"cancelling": "1", "unread": "0"}, "completed", True),
    ({"cancelling": "1", "unread": "0", "expired": "1"}, "expired", True),
    ({"cancelling": "1", "unread": "0", "cancelled": "1"}, "cancelled", True),
    ({"cancelling": "1", "unread": "0", "stopped": "sealed"}, "cancelled", False),
])  # fmt: skip
def test_a_run_that_was_cancelled_too_late_is_completed_when_its_output_is_written(
    fields: dict[str, str], status: str, complete: bool
) -> None:
    run = Batch("run_1", ENDED | {"windows": "1", "valid": "2"} | fields)
    assert (run.status, run.complete) == (status, complete)
    # Another batch stays cancelled: its requests may have ended so in an earlier version
    other = Batch("b", ENDED | {"cancelling": "1", "unread": "0"})
    assert (other.status, other.complete) == ("cancelled", False)


def test_a_retried_batch_has_no_time_that_people_see() -> None:
    ended = Batch("b", ENDED)
    retried = Batch("b", ENDED | {"retried": "1"})
    assert (ended.shown_s, retried.shown_s, retried.seconds) == (0.008, None, 0.008)
