"""Each Redis command of a worker's scripts is one that its user in security.md has."""

from __future__ import annotations

import re

import pytest

from contract.redis.scripts import source
from demo.stack import ROOT

_CALL = re.compile(r"redis\.p?call\('([A-Z]+)'|call_many\('([A-Z]+)'")
SCRIPTS = sorted(path.stem for path in (ROOT / "worker" / "lua").glob("*.lua"))


def granted(user: str) -> set[str]:
    """Return the commands that the page gives a user."""
    (rules,) = re.findall(
        rf"^user {user} (.*)$", (ROOT / "docs/how-to/security.md").read_text(), re.MULTILINE
    )
    return {rule[1:] for rule in rules.split() if rule.startswith("+")}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_workers_user_may_run_all_of_a_script(script: str) -> None:
    commands = {(one or many).lower() for one, many in _CALL.findall(source(script))}
    assert len(commands) > 5
    assert commands - granted("warmq-worker") == set()
