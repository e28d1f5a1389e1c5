"""End an engine's processes and connections, and protect them from a terminal's signals."""

import asyncio
import contextlib
import multiprocessing
import signal
import threading
from collections.abc import Coroutine, Iterator
from multiprocessing import resource_tracker
from typing import Any

from worker.engine.parent_death import children_end_with_thread

#: Default seconds between SIGTERM and SIGKILL; vLLM's own.
KILL_GRACE_S = 5.0
#: Seconds in which connections have to close.
CLOSE_S = 5.0


def close_on(loop: asyncio.AbstractEventLoop, closing: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine on a loop from another thread, and wait for its end.

    Raises:
        TimeoutError: it took longer than CLOSE_S, and was cancelled.
    """
    if not loop.is_running():  # nothing can be closed in an orderly way any more
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
    """Start child processes within, without the terminal's Ctrl-C; they end with this thread.

    Ctrl-C is for the worker, which ends its engine when nothing runs in it any more. The signals
    are blocked, which children inherit, not ignored: engine processes set handlers of their own.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    resource_tracker.ensure_running()  # unblocks SIGINT in the thread that starts it
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGQUIT})
    try:
        with children_end_with_thread():
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_children(grace_s: float) -> None:
    """Send this process's children SIGTERM now, and SIGKILL after `grace_s`."""
    children = multiprocessing.active_children()
    for child in children:
        child.terminate()

    def kill() -> None:
        for child in children:
            child.kill()

    timer = threading.Timer(grace_s, kill)
    timer.daemon = True
    timer.start()
