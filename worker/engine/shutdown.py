"""Ends an engine: its processes, and its connections; and keeps them from ending by accident."""

import asyncio
import contextlib
import multiprocessing
import signal
import threading
from collections.abc import Coroutine, Iterator
from multiprocessing import resource_tracker
from typing import Any

from worker.engine.parent_death import children_end_with_thread

#: Between SIGTERM and SIGKILL where no setting says else; vLLM's own patience.
KILL_GRACE_S = 5.0
#: How long connections may take to close.
CLOSE_S = 5.0


def close_on(loop: asyncio.AbstractEventLoop, closing: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine on a loop from another thread and wait for its end, but not for ever.

    Raises:
        TimeoutError: it has not ended in time, and was cancelled.
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
    """Keep what a terminal sends to all its processes from those that this thread starts within.

    Ctrl-C is for the worker, which ends its engine when nothing runs in it any more. The signals
    are blocked, which children inherit, and not ignored: engine processes set handlers of their
    own. SIGTERM and SIGKILL arrive. Afterwards the thread has the signals it had.

    What multiprocessing starts within ends with this thread (tie.py).
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
    """Send SIGTERM to this process' children at once, SIGKILL after `grace_s`."""
    children = multiprocessing.active_children()
    for child in children:
        child.terminate()

    def insist() -> None:
        for child in children:
            child.kill()

    timer = threading.Timer(grace_s, insist)
    timer.daemon = True
    timer.start()
