"""End a process when its parent has ended, whatever ended that: by the kernel's PR_SET_PDEATHSIG.

A process has to ask for it, and asks in its first line: its imports take seconds, and vLLM's
EngineCore waits for its parent for five minutes before it loads any plugin.

The signal follows the THREAD that started the process, and is not inherited: children ask for
themselves (`children_end_with_thread`), except multiprocessing's resource tracker, which removes
what killed processes leave and ends when all its users have.
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

#: Set by the worker for its engine processes: seconds between SIGTERM and SIGKILL when the worker
#: has died. Not a setting; without it they are killed immediately.
ASK_FIRST_ENV = "WARMQ_ASK_FIRST_S"
_PR_SET_PDEATHSIG = 1
_ROOT = str(Path(__file__).absolute().parents[2])


def end_with_parent(parent: int, how: signal.Signals = signal.SIGKILL) -> None:
    """End this process by a signal when its parent has ended, or has ended already.

    `parent` is the pid that the parent has: this process may have another parent by now.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, how)
    if os.getppid() != parent:  # it ended before the call above: the kernel sends no signal
        os.kill(os.getpid(), how)


def outlive_parent() -> None:
    """Undo `end_with_parent`, for a process that sees its parent's end by other means."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)


def startup_code(name: str) -> str:
    """Return Python code with which a new process calls a function of this module.

    It imports this process's modules, whatever else is called `worker` in the current folder or is
    installed: `celery -A` removes the folder in which it found the app from its path again.
    """
    path = sys.path if _ROOT in sys.path else [_ROOT, *sys.path]
    find = f"import sys; sys.path[:] = {path!r}"
    return f"{find}; from {__name__} import {name}; {name}({os.getpid()}); "


# -- engine processes ----------------------------------------------------------------


class _Engine:
    """The pid that was set up, and whether its children will be."""

    tied = 0
    ties_children = False


def end_engine_with_parent(parent: int) -> None:
    """End a process of an engine, and its multiprocessing children, with the parent.

    By SIGKILL unless the worker has set ASK_FIRST_ENV: EngineCore answers SIGTERM between two
    steps, so one that hangs, or is stopped, would outlive its owner.
    """
    if _Engine.tied == os.getpid():
        return
    _Engine.tied = os.getpid()
    grace = os.environ.get(ASK_FIRST_ENV)
    if grace is not None:
        args = (parent, float(grace))
        threading.Thread(target=_kill_after_parent, args=args, daemon=True).start()
    _tie_children()
    end_with_parent(parent, signal.SIGKILL if grace is None else signal.SIGTERM)


def _kill_after_parent(parent: int, grace_s: float) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    time.sleep(grace_s)
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def children_end_with_thread() -> Iterator[None]:
    """Start multiprocessing's children within: as an engine's, they end with this thread."""
    _tie_children()
    try:
        yield
    finally:
        _Engine.ties_children = False


def _tie_children() -> None:
    _Engine.ties_children = True
    if spawn.get_command_line is not _command_line:
        spawn.get_command_line = _command_line
        util.register_after_fork(_Engine, _forked)


_plain_command_line = spawn.get_command_line


def _command_line(**given: Any) -> list[str]:
    """Return a spawned process's command, with our startup code first."""
    words = _plain_command_line(**given)
    if _Engine.ties_children and "-c" in words:
        code = words.index("-c") + 1
        words[code] = startup_code("end_engine_with_parent") + words[code]
    return words


def _forked(_: Any) -> None:
    """Set up a process that multiprocessing has forked."""
    parent = multiprocessing.parent_process()
    if _Engine.ties_children and parent is not None and parent.pid is not None:
        end_engine_with_parent(parent.pid)
