"""Ends an engine's processes: they are asked first, and killed if they do not."""

from __future__ import annotations

import multiprocessing
import threading

KILL_GRACE_S = 5.0


def end_children(grace_s: float | None) -> None:
    """Send SIGTERM to this process' children at once, SIGKILL after `grace_s` (None is 5 s)."""
    children = multiprocessing.active_children()
    for child in children:
        child.terminate()

    def insist() -> None:
        for child in children:
            child.kill()

    timer = threading.Timer(KILL_GRACE_S if grace_s is None else grace_s, insist)
    timer.daemon = True
    timer.start()
