"""Keeps an engine's thread, and an engine that is not in use between two drains of its model."""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from contract.errors import EngineDead
from worker.engine import Capacity, Engine

log = logging.getLogger(__name__)
T = TypeVar("T")

#: Seconds between two kills of an engine that is still being built when the worker stops.
KILL_EVERY_S = 0.5
#: Seconds that an engine's shutdown may take in addition to the `grace_s` of its processes.
SHUTDOWN_S = 8.0


class EngineKeeper:
    """Has the one thread that builds and ends a model's engine; keeps no engine between drains.

    The thread lives as long as this object, because the kernel ends the engine's processes when the
    thread ends that created them (PR_SET_PDEATHSIG, worker/engine/parent_death.py). The methods
    from `take` to `keep` keep nothing here; worker/models has subclasses that keep engines.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        #: Whether a shutdown has not ended in time; then the thread can do nothing else.
        self.stuck = False
        #: Whether the engine has not answered in time: its shutdown kills it at once.
        self.hangs = False
        #: Why an engine that could be kept is no longer kept; '' while nothing has failed.
        self.failure = ""

    def take(self) -> tuple[Engine, Capacity] | None:
        """Return the kept engine, which is kept no longer; None if there is none."""
        return None

    async def wake(self, engine: Engine) -> bool:
        """Make a kept engine ready for requests; return False if it must be replaced."""
        return not engine.dead()

    def before_build(self, engine: Engine) -> None:
        """Note that an engine is about to be built."""

    async def after_start(self, engine: Engine) -> None:
        """Note that an engine has started, and has no request yet."""

    def next_load_s(self, load_s: float) -> float:
        """Return the expected seconds of the model's next load after one of `load_s` seconds."""
        return load_s

    async def keep(self, engine: Engine, capacity: Capacity, wanted: Callable[[], bool]) -> bool:
        """Keep an engine without requests; return False if the caller must shut it down.

        If `wanted()` becomes false meanwhile, return False at once.
        """
        return False

    async def end(self) -> None:
        """Shut a kept engine down."""
        if (kept := self.take()) is not None:
            await self.shut_down(kept[0])

    async def in_thread(self, call: Callable[[], T]) -> T:
        """Call a function in the engine's thread."""
        if self.stuck:
            raise EngineDead("the shutdown of the previous engine has not ended")
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    async def shut_down(
        self, engine: Engine | None, grace_s: float = 0.0, *, kill: bool = False
    ) -> None:
        """Shut an engine down; log errors, since the rest of the stop must follow.

        An engine that hangs is killed. Without an engine this waits for earlier calls in the
        thread, at most `grace_s` + SHUTDOWN_S seconds.
        """
        kill, self.hangs = kill or self.hangs, False
        limit_s = (engine.grace_s if engine else grace_s) + SHUTDOWN_S
        deadline = time.monotonic() + limit_s
        shutdown = asyncio.create_task(self.in_thread(engine.shutdown if engine else _do_nothing))
        shutdown.add_done_callback(_log_failure)
        while not shutdown.done() and (left_s := deadline - time.monotonic()) > 0:
            if kill and engine is not None:
                kill_engine(engine)  # repeatedly, because it may just start another process
            await asyncio.wait([shutdown], timeout=min(left_s, KILL_EVERY_S))
        if not shutdown.done():
            self.stuck = True
            text = "the engine's shutdown has not ended after %g s; its processes end with this one"
            log.error(text, limit_s, extra={"action": "shutdown_hangs"})


def kill_engine(engine: Engine) -> None:
    """Kill an engine's processes; log errors."""
    try:
        engine.kill()
    except Exception:  # the caller, the stop or the watchdog, must go on
        log.exception("the engine could not be killed", extra={"action": "kill_failed"})


def _log_failure(shutdown: asyncio.Task[None]) -> None:
    if not shutdown.cancelled() and (error := shutdown.exception()):
        text, extra = "the engine's shutdown failed: %s", {"action": "shutdown_failed"}
        log.error(text, error, exc_info=error, extra=extra)


def _do_nothing() -> None:
    """Do nothing: wait in the engine's thread for earlier calls to end."""
