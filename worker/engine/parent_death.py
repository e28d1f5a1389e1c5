"""Ties a process to its parent: the kernel ends it when that one has ended, whatever it died of.

A process has to ask for that itself, and asks with its first line: what it imports takes seconds,
and vLLM's EngineCore then waits for its parent for five minutes before it loads any plugin.

The signal follows the THREAD that started the process. It is not inherited: the children of a tied
process are tied themselves (`children_end_with_thread`).
multiprocessing's resource tracker is left out: it removes what killed
processes leave behind, and ends when all that use it have ended.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import spawn, util
from pathlib import Path
from typing import Any

#: Set by the worker, read by its engine processes: seconds between SIGTERM and SIGKILL when the
#: worker has died. Not a setting; without it they are killed at once.
ASK_FIRST_ENV = "WARMQ_ASK_FIRST_S"
_PR_SET_PDEATHSIG = 1
_ROOT = str(Path(__file__).absolute().parents[2])


def end_with_parent(parent: int, how: signal.Signals = signal.SIGKILL) -> None:
    """End this process, now or later, when its parent has ended.

    Args:
        parent: the parent's pid, as the parent knows it: it may have ended already.
        how: the signal to end with.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, how)
    if os.getppid() != parent:  # it ended before we asked: no signal comes any more
        os.kill(os.getpid(), how)


def outlive_parent() -> None:
    """Let this process outlive its parent, whose end it sees by other means."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)


def startup_code(name: str) -> str:
    """Return Python code that ties a new process to this one by a function of this module.

    It runs the code that this process runs, whatever else is called `worker` in the current folder
    or is installed: `celery -A` takes the folder that it has found it in out of its path again.
    """
    path = sys.path if _ROOT in sys.path else [_ROOT, *sys.path]
    find = f"import sys; sys.path[:] = {path!r}"
    return f"{find}; from {__name__} import {name}; {name}({os.getpid()}); "


# -- engine processes -----------------------------------------------------------


class _Engine:
    """Whether this process is tied as an engine's, and ties its children so."""

    tied = 0
    ties = False


def end_engine_with_parent(parent: int) -> None:
    """Tie a process of an engine, and all that it starts by multiprocessing.

    SIGKILL, unless the worker has set ASK_FIRST_ENV: EngineCore answers SIGTERM between two steps,
    so one that hangs, or is stopped, would outlive its owner.
    """
    if _Engine.tied == os.getpid():
        return
    _Engine.tied = os.getpid()
    grace = os.environ.get(ASK_FIRST_ENV)
    if grace is not None:
        insist = threading.Thread(target=_insist, args=(parent, float(grace)), daemon=True)
        insist.start()
    _tie_children()
    end_with_parent(parent, signal.SIGKILL if grace is None else signal.SIGTERM)


def _insist(parent: int, grace_s: float) -> None:
    """Kill this process if it has not ended so long after its parent."""
    while os.getppid() == parent:
        time.sleep(1)
    time.sleep(grace_s)
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def children_end_with_thread() -> Iterator[None]:
    """Tie what multiprocessing starts within to the thread that starts it, as an engine's."""
    _tie_children()
    try:
        yield
    finally:
        _Engine.ties = False


def _tie_children() -> None:
    _Engine.ties = True
    if spawn.get_command_line is not _command_line:
        spawn.get_command_line = _command_line
        util.register_after_fork(_Engine, _forked)


_untied_command_line = spawn.get_command_line


def _command_line(**given: Any) -> list[str]:
    """Return the command of a process that is spawned, with ours as its first line."""
    words = _untied_command_line(**given)
    if _Engine.ties and "-c" in words:
        words[words.index("-c") + 1] = (
            startup_code("end_engine_with_parent") + words[words.index("-c") + 1]
        )
    return words


def _forked(_: Any) -> None:
    """Tie a process that multiprocessing has forked."""
    parent = multiprocessing.parent_process()
    if _Engine.ties and parent is not None and parent.pid is not None:
        end_engine_with_parent(parent.pid)
