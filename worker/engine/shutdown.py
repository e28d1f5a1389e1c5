"""Ends an engine's processes and connections, and keeps a terminal's signals from them."""

import asyncio
import contextlib
import signal
import threading
from collections.abc import Coroutine, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

from worker.engine.parent_death import children_end_with_thread

#: Default seconds between SIGTERM and SIGKILL for engine processes, as in vLLM.
KILL_GRACE_S = 5.0
#: Seconds that `close_on` waits for the connections to close.
CLOSE_S = 5.0


def close_on(loop: asyncio.AbstractEventLoop, closing: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine on another thread's loop, and wait for its end.

    Raises:
        TimeoutError: the coroutine took longer than CLOSE_S, and was cancelled.
    """
    if not loop.is_running():  # its connections cannot be closed any more
        closing.close()
        return
    future = asyncio.run_coroutine_threadsafe(closing, loop)
    try:
        future.result(CLOSE_S)
    except TimeoutError:
        future.cancel()
        raise TimeoutError(f"its connections were not closed within {CLOSE_S:g} s") from None


@contextlib.contextmanager
def children_shielded() -> Iterator[None]:
    """Child processes started in this context do not get Ctrl-C, and end with this thread.

    Only the worker handles Ctrl-C: it ends the engine when the engine runs no more requests. The
    signals are blocked, not ignored: children inherit the block, and engine processes set their own
    handlers.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    resource_tracker.ensure_running()  # its start unblocks SIGINT in this thread
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGQUIT})
    try:
        with children_end_with_thread():
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_children(children: Sequence[BaseProcess], grace_s: float) -> None:
    """Send child processes SIGTERM now, and SIGKILL after `grace_s` seconds."""
    for child in children:
        child.terminate()

    def kill() -> None:
        for child in children:
            child.kill()

    timer = threading.Timer(grace_s, kill)
    timer.daemon = True
    timer.start()
