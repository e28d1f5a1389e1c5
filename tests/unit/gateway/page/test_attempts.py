"""The table of a request's attempts."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from gateway.page.rendering import LANGUAGES, render, translate
from producer.request_reads import Attempt

VIEW: dict[str, Any] = {
    "theme": "auto", "languages": LANGUAGES, "path": "/ui/batches/b/request", "csrf": "",
    "notice": "", "notice_n": "", "logged_in": False, "refused": False, "choose": lambda **_: "",
}  # fmt: skip


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_worker_of_the_attempt_that_ended_is_not_kept(language: str) -> None:
    state: dict[str, Any] = defaultdict(lambda: None)
    state |= {"ended": True, "name": "completed", "attempts": 2, "worker": "", "text": "",
              "failed_attempts": [Attempt(5000, "w1", "lease")]}  # fmt: skip
    shown = render(
        "request.html", language, batch_id="b", custom_id="r1", state=state, prompt="", whole=True,
        file="in.jsonl", caller=None, stalls=[], **VIEW,
    )  # fmt: skip
    rows = shown.partition("<tbody>")[2].partition("</tbody>")[0]
    assert "w1" in rows
    assert translate(language, "not kept") in rows
