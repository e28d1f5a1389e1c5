"""A remedy on a batch's page names what its buttons and commands do."""

from __future__ import annotations

from typing import Any

import pytest

from contract.batch import Batch
from contract.redis.objects import Stored
from gateway.page import failed
from gateway.page.failed import failed_codes
from gateway.redis.batch_views import BatchView

ROW = {"cancelled": 1, "expired": 1}
RUN = {"created_at": "1", "windows": "0", "sealed": "1"}


@pytest.fixture(autouse=True)
def no_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failed, "failures_of_view", lambda services, view: [])


def remedies(source: Any) -> dict[str, str]:
    services: Any = None
    groups = failed_codes(services, BatchView("b1", source, []), ROW)
    return {one.code: one.remedy for one in groups}


def test_expired_requests_of_a_submit_are_retried_without_a_deadline() -> None:
    remedy = remedies(Batch("b1", {"created_at": "1"}))["expired"]
    assert "without a deadline" in remedy
    assert "completion window" not in remedy


def test_expired_lines_over_http_are_retried_with_the_same_completion_window() -> None:
    assert "the same completion window" in remedies(Stored("b1", b"", 1))["expired"]


def test_the_command_runs_the_cancelled_lines_of_a_run() -> None:
    stopped = {"stopped": "sealed", "cancelling": "1", "reason": "stopped: 1 of 2"}
    assert "goes on" in remedies(Batch("run_1", RUN | stopped))["cancelled"]
    cancelled = RUN | {"cancelling": "1", "finished_at": "9"}
    assert remedies(Batch("run_1", cancelled))["cancelled"].startswith("When the run is complete")
    complete = remedies(Batch("run_1", cancelled | {"unread": "0"}))["cancelled"]
    assert complete.startswith("The same") and "--retry cancelled" in complete
