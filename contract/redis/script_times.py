"""How often this process has called each Lua script, how long Redis took, how often it failed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from contract.errors import StoreUnavailable


class ScriptTimes(NamedTuple):
    """Calls; the seconds until they were answered, network included; how many of them failed,
    because Redis was away or refused them."""

    calls: int = 0
    seconds: float = 0.0
    errors: int = 0


_lock = threading.Lock()
_times: dict[str, ScriptTimes] = {}


@contextmanager
def timed(script: str) -> Iterator[None]:
    """Count a call, the seconds until the context is left, and whether StoreUnavailable was
    raised."""
    began, failed = time.perf_counter(), False
    try:
        yield
    except StoreUnavailable:
        failed = True
        raise
    finally:
        took_s = time.perf_counter() - began
        with _lock:
            calls, seconds, errors = _times.get(script, ScriptTimes())
            _times[script] = ScriptTimes(calls + 1, seconds + took_s, errors + failed)


def script_times(always: Iterable[str] = ()) -> dict[str, ScriptTimes]:
    """Return what was counted of each script since the process started: of those that were
    called, and of `always`."""
    with _lock:
        return dict.fromkeys(always, ScriptTimes()) | _times


def script_errors() -> int:
    """Return how many calls of scripts have failed since the process started."""
    return sum(times.errors for times in script_times().values())
