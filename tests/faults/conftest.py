"""What several files of fault tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.stacks.previous import Previous, previous_release

from demo.stack import RedisServer


@pytest.fixture(scope="session")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Previous:
    """Return the release before this one, installed beside this one."""
    return previous_release(tmp_path_factory.mktemp("previous"))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """Return a Redis of this test's own, with an append-only file, that it may stop."""
    with RedisServer(tmp_path / "redis") as server:
        yield server
