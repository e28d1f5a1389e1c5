"""Ends a process when its parent ends, by the kernel's PR_SET_PDEATHSIG.

The process itself has to ask the kernel for this. It asks in its first line of code: its imports
take seconds, and vLLM's EngineCore waits five minutes for its parent before it loads any plugin.

The kernel sends the signal when the THREAD ends that started the process. Children do not inherit
the setting, so they ask, too (`children_end_with_thread`). An exception is
multiprocessing's resource tracker: it removes what killed processes leave behind, and ends when
all processes that use it have ended.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import spawn, util
from pathlib import Path
from typing import Any

#: The variable that the worker sets for its engine processes: seconds between SIGTERM and SIGKILL
#: after the worker's death. Users do not set it. Without it the processes get SIGKILL immediately.
ASK_FIRST_ENV = "WARMQ_ASK_FIRST_S"
#: The variable with the path of the file for the output of engine processes; the worker sets it.
ENGINE_LOG = "WARMQ_ENGINE_LOG"
#: The number of this option of prctl(2), from <linux/prctl.h>.
_PR_SET_PDEATHSIG = 1
#: The folder that contains the package `worker`.
_ROOT = str(Path(__file__).absolute().parents[2])


def end_with_parent(parent: int, signum: signal.Signals = signal.SIGKILL) -> None:
    """Make the kernel send this process a signal when its parent ends, or has ended.

    `parent` is the pid of the process that started this one. After its end, os.getppid() differs.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:  # the parent ended before the call: no signal comes
        os.kill(os.getpid(), signum)


def outlive_parent() -> None:
    """Undo `end_with_parent`, for a process that notices its parent's end in another way."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)


def startup_code(name: str) -> str:
    """Return Python code with which a new process calls a function of this module.

    The new process imports the same modules as this one, even if another `worker` is installed or
    is in the current folder: `celery -A` removes the app's folder from sys.path after the import.
    """
    path = sys.path if _ROOT in sys.path else [_ROOT, *sys.path]
    find = f"import sys; sys.path[:] = {path!r}"
    return f"{find}; from {__name__} import {name}; {name}({os.getpid()}); "


# -- engine processes ----------------------------------------------------------------


class _ThisProcess:
    """How this process is set up: `tied` is its pid if it ends with its parent.

    `ties_children`: the children that it starts end with it. A forked child inherits both values,
    and is not set up itself while `tied` differs from its pid.
    """

    tied = 0
    ties_children = False


def end_engine_with_parent(parent: int) -> None:
    """End this engine process, and its multiprocessing children, when its parent ends.

    These processes get SIGKILL, or with ASK_FIRST_ENV first SIGTERM. EngineCore handles SIGTERM
    only between two steps: an EngineCore that hangs, or is stopped, would outlive its parent
    without SIGKILL.
    """
    if _ThisProcess.tied == os.getpid():
        return
    _ThisProcess.tied = os.getpid()
    _redirect_output()
    grace = os.environ.get(ASK_FIRST_ENV)
    if grace is not None:
        args = (parent, float(grace))
        threading.Thread(target=_kill_after_parent, args=args, daemon=True).start()
    _tie_children()
    end_with_parent(parent, signal.SIGKILL if grace is None else signal.SIGTERM)


def _redirect_output() -> None:
    """Send this process's stdout and stderr to the engine's log, if there is one."""
    path = os.environ.get(ENGINE_LOG, "-")
    if path == "-":
        return
    with suppress(OSError):  # the folder was removed, or the disk is full
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)


def _kill_after_parent(parent: int, grace_s: float) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    time.sleep(grace_s)
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def children_end_with_thread() -> Iterator[None]:
    """Let children that multiprocessing starts in this context end with this thread."""
    _tie_children()
    try:
        yield
    finally:
        _ThisProcess.ties_children = False


def _tie_children() -> None:
    _ThisProcess.ties_children = True
    if spawn.get_command_line is not _command_line:
        spawn.get_command_line = _command_line
        util.register_after_fork(_ThisProcess, _forked)


#: multiprocessing's function that `_command_line` replaces.
_plain_command_line = spawn.get_command_line


def _command_line(**options: Any) -> list[str]:
    """Return the command line of a spawned process, with our startup code first."""
    words = _plain_command_line(**options)
    if _ThisProcess.ties_children and "-c" in words:
        code = words.index("-c") + 1
        words[code] = startup_code("end_engine_with_parent") + words[code]
    return words


def _forked(_: Any) -> None:
    """Set up a process that multiprocessing has just forked."""
    parent = multiprocessing.parent_process()
    if _ThisProcess.ties_children and parent is not None and parent.pid is not None:
        end_engine_with_parent(parent.pid)
