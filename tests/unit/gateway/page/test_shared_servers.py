"""The card of a worker that shares a server with people."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from gateway.http.caller import Caller
from gateway.page.fleet import Chart, _worker
from gateway.page.rendering import LANGUAGES, render

ROW = {
    "server": "host:8000", "in_flight": 12, "in_server": 30, "limit": 24, "workers": 2,
    "why": "nobody is slower", "ttft_ms": 30.1, "ttft_ms_target": 66.0, "itl_ms": 8.0,
    "itl_ms_target": None, "tokens_today": 1203,
}  # fmt: skip
ANNOUNCED: dict[str, Any] = {
    "id": "w", "silent_s": 0.1, "queue": "warmq", "state": "ready", "shared": [ROW],
}  # fmt: skip
#: What every page needs.
VIEW: dict[str, Any] = {
    "theme": "auto", "languages": LANGUAGES, "path": "/ui/workers", "csrf": "", "notice": "",
    "notice_n": "", "logged_in": False, "choose": lambda **_: "",
}  # fmt: skip


def test_only_operators_see_servers() -> None:
    (server,) = _worker(ANNOUNCED, True, "warmq")["servers"]
    assert server.server == "host:8000"
    assert _worker(ANNOUNCED, False, "warmq")["servers"] == []


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_card_has_our_part_the_reason_what_people_feel_and_the_tokens(language: str) -> None:
    worker = _worker(ANNOUNCED, True, "warmq")
    facts = defaultdict(lambda: None)
    shown = render(
        "workers.html", language, shown=[worker], fills={"w": Chart("", "", 0, 0, 0, 0)},
        rates=facts, machines={"w": {"device": None, "host": None, "log": []}}, page=1, more=False,
        caller=Caller(operator=True), **VIEW,
    )  # fmt: skip
    for value in ("host:8000", "12 / 30", "24", "nobody is slower", "30 ms", "66 ms", "1,203"):
        assert value in shown
