"""Every answer of every test here is held against OpenAI's own schemas, and /openapi.json."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import watched_answers

watched_answers.watch()


@pytest.fixture(autouse=True)
def every_answer_is_valid() -> Iterator[None]:
    """Fail a test if an answer that came in it is not as OpenAI's document says."""
    watched_answers.faults.clear()
    yield
    found, watched_answers.faults[:] = list(watched_answers.faults), []
    assert not found, "answers against OpenAI's schemas:\n" + "\n".join(found)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many answers were judged."""
    total = sum(watched_answers.judged.values())
    terminalreporter.write_line(f"{total} answers held against OpenAI's schemas")
