"""A failing test that holds results of Celery ends like any other: its run tells the totals."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from demo.stack import ROOT

FAILING = """
import pytest
from kit.stacks.celery_side import client_app, send
from demo.stack import RedisServer

@pytest.fixture(scope="session")
def app(tmp_path_factory):
    with RedisServer(tmp_path_factory.mktemp("redis"), "--appendonly", "no") as server:
        with client_app(server.url) as app:
            yield app

def test_waits_in_vain(app):
    send(app, {}).get(timeout=0.2)

def test_holds_several(app):
    held = [send(app, {}) for _ in range(3)]
    with pytest.raises(ValueError):
        held[0].get(timeout=0.2)

def test_gave_up_on_one_and_fails_later(app):
    held = send(app, {})
    with pytest.raises(Exception):
        held.get(timeout=0.2)
    assert held is None

@pytest.mark.timeout(2)
def test_is_ended_by_its_time_limit(app):
    send(app, {}).get(timeout=30)
"""


@pytest.mark.timeout(120)
def test_pytest_tells_its_totals_after_celery_tests_that_fail(tmp_path: Path) -> None:
    (tmp_path / "test_failing.py").write_text(FAILING)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml",
         "--rootdir", ROOT, tmp_path],
        cwd=ROOT, capture_output=True, text=True, timeout=110, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert re.search(r"=+ 4 failed in [\d.]+s.*=+\s*$", done.stdout), done.stdout[-2000:]
    assert done.stderr == ""
