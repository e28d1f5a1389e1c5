"""What this worker adds to vLLM's processes: a copy of errors, a quieter end, a utility call.

pdeath.py sets it up in each process. Nothing of vLLM is imported.
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
# vLLM's error in the worker is only "see root cause above": the process that failed logs the cause,
# maybe elsewhere. So each engine process copies its errors into a file for the worker.

#: Names the file to engine processes; not a setting.
VARIABLE = "WARMQ_ENGINE_ERRORS"
#: Most bytes of errors that the worker's log repeats.
SHOWN_BYTES = 16_384


class _Copy(logging.Handler):
    """Appends each error in one write, so that processes may share the file."""

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
    """Start copying this engine process's errors for the worker."""
    if path := os.environ.get(VARIABLE):
        logging.getLogger("vllm").addHandler(_Copy(path))


class RootCause:
    """The worker's end of the file of errors of one engine."""

    def __init__(self) -> None:
        handle, name = tempfile.mkstemp(prefix="warmq-engine-", suffix=".errors")
        os.close(handle)
        self._path = Path(name)
        self.processes: list[BaseProcess] = []
        os.environ[VARIABLE] = name

    def read(self) -> str:
        """Return how processes ended, and their errors; '' if unknown. The first is the cause."""
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
# The worker logs that it stops, and why. With VLLM_LOGGING_LEVEL=DEBUG all is logged.

STEPS = ("[shutdown]", "Parent process exited")
#: AsyncLLM's error, with a traceback, after its engine has ended, even if it was asked to end.
CONSEQUENCE = "AsyncLLM output_handler failed"


class _OrderlyEnd(logging.Filter):
    """Drops vLLM's steps of an end; while the worker ends the engine also their consequence."""

    ending = False

    def filter(self, record: logging.LogRecord) -> bool:
        if logging.getLogger("vllm").isEnabledFor(logging.DEBUG):
            return True
        text = str(record.msg)
        if self.ending and text.startswith(CONSEQUENCE):
            return False
        return record.levelno > logging.INFO or not text.startswith(STEPS)


ORDERLY_END = _OrderlyEnd()


def quieten() -> None:
    """Add the filter to vLLM's log in this process."""
    for handler in logging.getLogger("vllm").handlers:
        handler.addFilter(ORDERLY_END)


# -- requests of a client that died --------------------------------------------------

#: The utility call of EngineCore that aborts them.
ABORT_CLIENT = "warmq_abort_client"
#: Where vLLM's EngineCore is defined.
CORE_MODULE = "vllm.v1.engine.core"


def abort_client(core: Any, client: int) -> int:
    """Abort all requests of one client of an EngineCore; return how many."""
    requests = core.scheduler.requests.values()
    left = [one.request_id for one in requests if one.client_index == client]
    core.abort_requests(left)
    return len(left)


def add_abort_call() -> None:
    """Add the call to EngineCore, if this process has one."""
    if core := sys.modules.get(CORE_MODULE):
        setattr(core.EngineCore, ABORT_CLIENT, abort_client)
