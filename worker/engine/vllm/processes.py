"""What this worker adds to each process of vLLM's: a copy of its errors, a quieter end, a call.

pdeath.py sets it up there. Nothing of vLLM is imported.
"""

import logging
import os
import signal
import sys
import tempfile
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

# -- why a process failed, brought to the worker's own log ---------------------------
# What vLLM raises in the worker says only "see root cause above": the cause is logged by the
# process that failed, and may have gone somewhere else. So each engine process copies its errors
# into a file, and the worker reads them when the engine is dead.

#: How engine processes are told where to write; not a setting.
VARIABLE = "WARMQ_ENGINE_ERRORS"
#: Most bytes of the errors that are repeated in the worker's log.
SHOWN_BYTES = 16_384


class _Copy(logging.Handler):
    """Appends each error with one write, so that processes may share the file."""

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
    """Called in an engine process: from now on its errors are kept for the worker."""
    if path := os.environ.get(VARIABLE):
        logging.getLogger("vllm").addHandler(_Copy(path))


class RootCause:
    """The worker's side: one file, emptied for every engine that is built."""

    def __init__(self) -> None:
        handle, name = tempfile.mkstemp(prefix="warmq-engine-", suffix=".errors")
        os.close(handle)
        self._path = Path(name)
        self.processes: list[BaseProcess] = []
        os.environ[VARIABLE] = name

    def tell(self) -> str:
        """Return the first error with its traceback, else how the processes ended; '' if unknown.

        The first one is the cause, what follows are its consequences.
        """
        text = ""
        if self._path.exists():
            text = self._path.read_bytes()[:SHOWN_BYTES].decode(errors="replace").strip()
        ended = [_ending(p) for p in self.processes if p.exitcode]
        return "\n".join([*ended, text]).strip()

    def forget(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)


def _ending(process: BaseProcess) -> str:
    code = process.exitcode or 0
    if code == -signal.SIGKILL:
        return f"{process.name} was killed by SIGKILL (out of memory, or by hand)"
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    return f"{process.name} ended {how}"


# -- what vLLM logs of an orderly end ------------------------------------------------
# The worker says that it stops, and why. With VLLM_LOGGING_LEVEL=DEBUG all of it is logged.

STEPS = ("[shutdown]", "Parent process exited")
#: What AsyncLLM makes of an engine that has ended, with a traceback, also if it was told to.
CONSEQUENCE = "AsyncLLM output_handler failed"


class _OrderlyEnd(logging.Filter):
    """`ending` says that the worker is ending the engine; warnings and errors of that are kept."""

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
    """Leave it out in this process from now on."""
    for handler in logging.getLogger("vllm").handlers:
        handler.addFilter(ORDERLY_END)


# -- what a client has left that died ------------------------------------------------

#: The utility call by which EngineCore is asked.
ABORT_CLIENT = "warmq_abort_client"
#: Where vLLM's EngineCore is defined.
CORE_MODULE = "vllm.v1.engine.core"


def abort_client(core: Any, client: int) -> int:
    """Abort all requests of one client; return how many.

    Args:
        core: vLLM's EngineCore, between two steps.
        client: its number, as each request has it.
    """
    requests = core.scheduler.requests.values()
    left = [one.request_id for one in requests if one.client_index == client]
    core.abort_requests(left)
    return len(left)


def add_abort_call() -> None:
    """Add the call to EngineCore, if this process has one."""
    if core := sys.modules.get(CORE_MODULE):
        setattr(core.EngineCore, ABORT_CLIENT, abort_client)
