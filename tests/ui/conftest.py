"""A browser for all tests here, and a gateway with a worker behind it for each module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kit.gateways.browser import browser
from kit.gateways.live_stack import Stack
from playwright.sync_api import Browser


@pytest.fixture(scope="session")
def chrome() -> Iterator[Browser]:
    """Return a headless Chromium."""
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Return a gateway without keys and a worker with the simulated engine, of four slots."""
    with Stack(tmp_path_factory.mktemp("stack")) as found:
        yield found
