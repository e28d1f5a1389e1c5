"""A worker by each command that starts one, and the processes that belong to it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil

from demo.stack import Worker, eventually


class WarmqWorker(Worker):
    """A worker started by `warmq-worker`; Worker itself is `celery -A worker.app`."""

    def command(self) -> list[str]:
        """Return the command that starts it."""
        return [str(Path(self.python).parent / "warmq-worker"), "--loglevel=INFO"]


KINDS: dict[str, type[Worker]] = {"celery": Worker, "warmq-worker": WarmqWorker}


def processes_of(worker: Worker) -> list[psutil.Process]:
    """Return all that runs of a worker, also of one that was killed: its session is its own."""
    return [each for each in psutil.process_iter() if _session(each) == worker.pid and runs(each)]


def suspend(pid: int) -> None:
    """Stop a process, and wait until each of its threads has: until then one may go on."""
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: all(map(_is_stopped, Path(f"/proc/{pid}/task").iterdir())), 10, "it stops")


def _is_stopped(task: Path) -> bool:
    # Its state follows the command, which may itself have blanks and brackets.
    return (task / "stat").read_text().rpartition(")")[2].split()[0] in "TZ"


def _session(process: psutil.Process) -> int:
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return -1


def runs(process: psutil.Process) -> bool:
    """Return whether a process has not ended; a zombie has."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def command_of(process: psutil.Process) -> str:
    """Return a process's command line, or the title it gave itself; "" if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
