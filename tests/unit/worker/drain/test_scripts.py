"""The log line of a script that Redis did not run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from contract.errors import StoreUnavailable
from worker.drain.scripts import UNTIL_DONE, Scripts


@pytest.mark.parametrize("name", ["bury", "done", "release"])
async def test_the_log_names_what_is_tried_again_in_words(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[Any] = [StoreUnavailable("Redis: away"), 7]

    async def run_script(*_: Any) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    scripts = Scripts(SimpleNamespace(run_script=run_script), "warmq")
    assert await scripts.until_done(name) == 7
    (record,) = caplog.records
    assert UNTIL_DONE[name] in record.getMessage()
    assert " " in UNTIL_DONE[name] and "Redis: away" in record.getMessage()
