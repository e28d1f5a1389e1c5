"""Why an engine process failed, brought to the worker's own log.

What vLLM raises in the worker says only "see root cause above": the cause is logged by
the process that failed, and may have gone somewhere else. So each engine process copies
its errors into a file, and the worker reads them when the engine is dead.
"""

import logging
import os
import signal
import tempfile
from multiprocessing.process import BaseProcess
from pathlib import Path

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
