"""What several files of fault tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.stack import RedisServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """Return a Redis of this test's own, with an append-only file, that it may stop."""
    with RedisServer(tmp_path / "redis") as server:
        yield server
