"""Adds to vLLM's processes: a copy of their errors, a log filter, and a call to EngineCore.

pdeath.py sets them up in each process. This module imports nothing of vLLM.
"""

import logging
import os
import signal
import sys
import tempfile
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

# -- why a process failed ------------------------------------------------------------
# vLLM's error in the worker is only "see root cause above": the failed process logs the cause, and
# its log may be elsewhere. So each engine process also writes its errors to a file for the worker.

#: The variable that gives engine processes the file's path; users do not set it.
VARIABLE = "WARMQ_ENGINE_ERRORS"
#: Most bytes of these errors that the worker's log repeats.
SHOWN_BYTES = 16_384


class _Copy(logging.Handler):
    """Appends each error to the file in one write, because several processes write to it."""

    def __init__(self, path: str) -> None:
        super().__init__(logging.ERROR)
        self._path = path
        self.setFormatter(logging.Formatter("%(processName)s[%(process)d] %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
            os.write(file, (self.format(record) + "\n").encode())
            os.close(file)
        except OSError:
            self.handleError(record)


def copy_errors() -> None:
    """Start to copy this engine process's errors to the worker's file."""
    if path := os.environ.get(VARIABLE):
        logging.getLogger("vllm").addHandler(_Copy(path))


class RootCause:
    """The worker's access to the file with the errors of one engine's processes."""

    def __init__(self) -> None:
        handle, name = tempfile.mkstemp(prefix="warmq-engine-", suffix=".errors")
        os.close(handle)
        self._path = Path(name)
        self.processes: list[BaseProcess] = []
        os.environ[VARIABLE] = name

    def read(self) -> str:
        """Return how processes ended, then their errors (the cause first); '' if unknown."""
        text = ""
        if self._path.exists():
            text = self._path.read_bytes()[:SHOWN_BYTES].decode(errors="replace").strip()
        ended = [_ending(p.name, p.exitcode) for p in self.processes if p.exitcode]
        return "\n".join([*ended, text]).strip()

    def remove(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)


def _ending(name: str, code: int) -> str:
    if code == -signal.SIGKILL:
        return f"{name} was killed by SIGKILL (out of memory, or by hand)"
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    return f"{name} ended {how}"


# -- vLLM's log of an orderly end ----------------------------------------------------
# The worker itself logs that it stops, and why. VLLM_LOGGING_LEVEL=DEBUG turns the filter off.

#: Beginnings of vLLM's messages about the steps of its end.
STEPS = ("[shutdown]", "Parent process exited")
#: Beginning of AsyncLLM's error after the end of its engine, even if the worker ended the engine.
CONSEQUENCE = "AsyncLLM output_handler failed"


class _OrderlyEnd(logging.Filter):
    """Drops vLLM's messages about its end, and the error after an orderly end."""

    ending = False

    def filter(self, record: logging.LogRecord) -> bool:
        if logging.getLogger("vllm").isEnabledFor(logging.DEBUG):
            return True
        text = str(record.msg)
        if self.ending and text.startswith(CONSEQUENCE):
            return False
        return record.levelno > logging.INFO or not text.startswith(STEPS)


#: The filter of this process; `ending` is set while the worker ends the engine.
ORDERLY_END = _OrderlyEnd()


def quieten() -> None:
    """Add the filter to vLLM's log handlers in this process."""
    for handler in logging.getLogger("vllm").handlers:
        handler.addFilter(ORDERLY_END)


# -- requests of a client that died --------------------------------------------------

#: The name of the call to EngineCore that aborts the requests of a dead client.
ABORT_CLIENT = "warmq_abort_client"
#: The module that defines vLLM's EngineCore.
CORE_MODULE = "vllm.v1.engine.core"


def abort_client(core: Any, client: int) -> int:
    """Abort all requests of one client of an EngineCore; return their number."""
    requests = core.scheduler.requests.values()
    left = [one.request_id for one in requests if one.client_index == client]
    core.abort_requests(left)
    return len(left)


def add_abort_call() -> None:
    """Add the call to EngineCore, if this process has imported it."""
    if core := sys.modules.get(CORE_MODULE):
        setattr(core.EngineCore, ABORT_CLIENT, abort_client)
