"""The card of a worker whose announcement is overdue."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from gateway.http.caller import Caller
from gateway.page.fleet import Chart, Fleet, _worker
from gateway.page.rendering import LANGUAGES, render

VIEW: dict[str, Any] = {
    "theme": "auto", "languages": LANGUAGES, "path": "/ui/workers", "csrf": "", "notice": "",
    "notice_n": "", "logged_in": False, "choose": lambda **_: "",
}  # fmt: skip


def announced(silent_s: float, *, overdue: bool) -> dict[str, Any]:
    return {
        "id": "w", "silent_s": silent_s, "overdue": overdue, "queue": "warmq", "state": "ready",
    }  # fmt: skip


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_worker_that_is_overdue_is_silent_and_has_the_age_of_its_announcement(
    language: str,
) -> None:
    worker = _worker(announced(8.0, overdue=True), True, "warmq")
    assert (worker["state"], worker["alive"]) == ("silent", True)
    facts = defaultdict(lambda: None)
    shown = render(
        "workers.html", language, shown=[worker], fills={"w": Chart("", "", 0, 0, 0, 0)},
        rates=facts, machines={"w": {"device": None, "host": None, "log": []}}, page=1, more=False,
        caller=Caller(operator=True), **VIEW,
    )  # fmt: skip
    assert "8.0 s" in shown or "8 s" in shown


def test_the_slots_of_a_silent_worker_are_not_counted() -> None:
    slots: dict[str, Any] = {"slots": 64, "in_flight": 3}
    workers = [_worker(announced(age, overdue=age > 2) | slots, True, "warmq") for age in (8, 0)]
    fleet = Fleet(workers, "warmq", 0)
    assert (fleet.running, fleet.slots, len(fleet.seen), len(fleet.alive)) == (3, 64, 1, 2)


def test_other_workers_have_their_state() -> None:
    worker = _worker(announced(0.4, overdue=False), True, "warmq")
    assert (worker["state"], worker["seen_s"]) == ("ready", None)
