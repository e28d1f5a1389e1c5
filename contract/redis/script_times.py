"""How often this process has called each script of contract/lua, and how long Redis took."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_times: dict[str, tuple[int, float]] = {}


@contextmanager
def timed(script: str) -> Iterator[None]:
    """Count a call, and the seconds until the context is left."""
    began = time.perf_counter()
    try:
        yield
    finally:
        took_s = time.perf_counter() - began
        with _lock:
            calls, seconds = _times.get(script, (0, 0.0))
            _times[script] = calls + 1, seconds + took_s


def script_times(always: Iterable[str] = ()) -> dict[str, tuple[int, float]]:
    """Return calls and seconds, network included, of each script since the process started: of
    those that were called, and of `always`."""
    with _lock:
        return dict.fromkeys(always, (0, 0.0)) | _times
