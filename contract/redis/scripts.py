"""Reads the Lua scripts, and counts their calls.

The text of a script is that of the SHARED files of contract/lua and of its own file.
"""

import hashlib
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from importlib.util import find_spec
from typing import NamedTuple

from contract.errors import StoreUnavailable

#: The packages with scripts in a folder `lua`. `contract` has those that several packages run. The
#: names of all scripts differ.
PACKAGES = ("contract", "worker", "producer", "gateway")
#: The files of contract/lua that precede every script, in this order.
SHARED = ("failures", "common", "message", "turns", "charges", "leases")


@cache
def source(name: str) -> str:
    """Return the full text of one script, for example `source("pop")`."""
    folder = files("contract") / "lua"
    parts = [folder / f"{part}.lua" for part in SHARED]
    return "\n".join(part.read_text() for part in (*parts, _own_file(name)))


def _own_file(name: str) -> Traversable:
    for package in PACKAGES:
        spec = find_spec(package)  # an image may lack a package
        if spec is not None and spec.origin is not None:
            file = files(package) / "lua" / f"{name}.lua"
            if file.is_file():
                return file
    raise LookupError(f"no script is called {name}")


@cache
def sha(name: str) -> str:
    """Return a script's SHA-1 in hex, the argument of EVALSHA."""
    return hashlib.sha1(source(name).encode(), usedforsecurity=False).hexdigest()


class ScriptTimes(NamedTuple):
    """The number of calls of a script, their seconds, and the number of failed calls.

    The seconds are from each call to its reply, network included.
    """

    calls: int = 0
    seconds: float = 0.0
    errors: int = 0


_lock = threading.Lock()
_times: dict[str, ScriptTimes] = {}


@contextmanager
def timed(script: str) -> Iterator[None]:
    """Count a call of a script, its seconds, and whether it raised StoreUnavailable."""
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
    """Return the counts of the scripts that this process has called, and zeros for `always`."""
    with _lock:
        return dict.fromkeys(always, ScriptTimes()) | _times


def script_errors() -> int:
    """Return the number of failed calls of scripts since the process started."""
    return sum(times.errors for times in script_times().values())
