"""An event loop whose clock jumps to the next timer: what takes hours elsewhere takes no time."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    """Waits for nothing: the clock is put forward by as long as it should have waited."""

    loop: SimulatedLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if found or not timeout:
            if timeout is None and not found:
                raise RuntimeError("everything waits, and no timer runs")
            return found
        self.loop.now += timeout
        return found


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Its time is `now`, in seconds; nothing in it may wait for a socket or a thread."""

    def __init__(self) -> None:
        selector = _Selector()
        selector.loop = self
        self.now = 1000.0
        super().__init__(selector)

    def time(self) -> float:
        """Return the simulated time."""
        return self.now


def run_simulated(main: Coroutine[Any, Any, T], patch: pytest.MonkeyPatch) -> T:
    """Run it to its end on such a loop; time.monotonic() is the loop's until then."""
    loop = SimulatedLoop()
    with patch.context() as within:
        within.setattr(time, "monotonic", loop.time)
        try:
            return loop.run_until_complete(main)
        finally:
            loop.close()
