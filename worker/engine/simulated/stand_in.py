"""A child process in the place of vLLM's EngineCore, for the simulated engine.

It is `cat`: every engine step is a byte sent through it. Killed, it takes all that
is in flight along; stopped (SIGSTOP), no step is made any more. So what a test does
to EngineCore it can do to this one, in milliseconds instead of half a minute.
"""

import asyncio
import contextlib
import os
import subprocess
import time
from collections.abc import Callable

from worker.engine.end import children_shielded

STEP_S = 0.05
#: What the kernel may need to end a killed process.
KILLED_S = 5.0


class StandIn:
    """One such process. Started in the engine's thread, watched on the drain's loop."""

    def __init__(self) -> None:
        # Unbuffered, so that a byte is a step; it ends by itself when its owner's end of the pipe
        # is closed, whatever the owner died of.
        with children_shielded():
            self._process = subprocess.Popen(
                ["cat", "-u"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
            )
        assert self._process.stdin is not None and self._process.stdout is not None  # noqa: S101
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self.stepped_at = time.monotonic()
        self._waiting: set[asyncio.Future[None]] = set()

    def watch(self, died: Callable[[], None]) -> None:
        """Begin to make steps; `died` is called once, when the process has ended."""
        self._loop = asyncio.get_running_loop()
        self._died = died
        os.set_blocking(self._stdin.fileno(), False)
        self._loop.add_reader(self._stdout.fileno(), self._stepped)
        self._ask()

    async def step(self, dead: asyncio.Event) -> bool:
        """Wait for the next step, for ever if the process hangs; False if it is or was dead."""
        if dead.is_set():
            return False
        waiter = self._loop.create_future()
        self._waiting.add(waiter)
        try:
            await waiter
        finally:
            self._waiting.discard(waiter)
        return not dead.is_set()

    def _ask(self) -> None:
        with contextlib.suppress(BrokenPipeError, BlockingIOError):
            os.write(self._stdin.fileno(), b".")
        self._timer = self._loop.call_later(STEP_S, self._ask)

    def _stepped(self) -> None:
        if not os.read(self._stdout.fileno(), 4096):
            self._timer.cancel()
            self._loop.remove_reader(self._stdout.fileno())
            self._died()
        self.stepped_at = time.monotonic()
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)

    def kill(self) -> None:
        """Kill it, also when it hangs."""
        self._process.kill()

    def shutdown(self) -> None:
        """End it and wait; called in the engine's thread.

        Raises:
            subprocess.TimeoutExpired: it was killed, and is still there.
        """
        self._process.kill()
        self._process.wait(KILLED_S)
        if hasattr(self, "_loop"):
            self._loop.call_soon_threadsafe(self._forget)

    def _forget(self) -> None:
        self._timer.cancel()
        self._loop.remove_reader(self._stdout.fileno())
        self._stdin.close()
        self._stdout.close()
