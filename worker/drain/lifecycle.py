"""What a worker is doing, from its start to its end.

From the signal on, a stop ends within WARMQ_DRAIN_TIMEOUT_S, plus the grace that the engine's
processes get between SIGTERM and SIGKILL, plus STOP_S of stopping.py. All times are seconds.
"""

import asyncio
from collections.abc import Callable, Coroutine
from enum import StrEnum
from typing import Any

from worker.drain import stopping


class State(StrEnum):
    """What the worker is doing, as `inspect stats` shows it."""

    STARTING = "starting"
    READY = "ready"
    DEGRADED = "degraded"
    DRAINING = "draining"
    STOPPED = "stopped"


class Lifecycle:
    """The state of one worker, and its stop: first asked for, then hurried.

    It hurries once the drain timeout is over. A worker that stops does not become ready again.
    """

    def __init__(self, drain_timeout_s: float, give_up_in: Callable[[float], None]) -> None:
        self.state = State.STARTING
        self._asked = asyncio.Event()
        self._hurried = asyncio.Event()
        self._drain_timeout_s = drain_timeout_s
        #: Tells the writes to Redis for how long they may still be tried.
        self._give_up_in = give_up_in

    @property
    def stopping(self) -> bool:
        """Whether the worker takes nothing more."""
        return self._asked.is_set()

    @property
    def hurrying(self) -> bool:
        """Whether the worker waits for nothing any more."""
        return self._hurried.is_set()

    def engine_ready(self) -> None:
        """Note that the engine can run requests."""
        if not self.stopping:
            self.state = State.READY

    def engine_dead(self) -> None:
        """Note that the engine has to be replaced."""
        if not self.stopping:
            self.state = State.DEGRADED

    def stop(self) -> None:
        """Begin to stop; the drain timeout counts from the first call."""
        if not self.stopping:
            self._asked.set()
            self.state = State.DRAINING
            self._give_up_in(self._drain_timeout_s + stopping.HURRY_S)
            asyncio.get_running_loop().call_later(self._drain_timeout_s, self.hurry)

    def hurry(self) -> None:
        """Wait for nothing any more."""
        self.stop()
        if not self._hurried.is_set():
            self._hurried.set()
            self._give_up_in(stopping.HURRY_S)

    def stopped(self) -> None:
        """Note that the engine has ended, and with it the worker's work."""
        self.state = State.STOPPED

    async def until_asked(self, work: Coroutine[Any, Any, Any]) -> bool:
        """Await work, but end it when a stop is asked for; False then."""
        return await stopping.until(self._asked, work)

    async def until_hurried(self, work: Coroutine[Any, Any, Any]) -> bool:
        """Await work, but end it when the worker must hurry; False then."""
        return await stopping.until(self._hurried, work)
