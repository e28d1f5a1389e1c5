"""Changes vLLM's processes: copies warnings, filters logs, extends EngineCore.

pdeath.py sets them up in each process. This module imports nothing of vLLM.
"""

import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import orjson

from worker.engine import engine_log

log = logging.getLogger(__name__)

# -- warnings, and why a process failed ----------------------------------------------
# vLLM's error in the worker is only "see root cause above": the failed process logs the cause, and
# its log is elsewhere. So each engine process also writes its warnings and errors to a file for the
# worker, one JSON list on each line, which the worker logs.

#: The variable that gives engine processes the file's path; users do not set it.
VARIABLE = "WARMQ_ENGINE_ERRORS"
#: Most bytes of these errors that the worker's log repeats.
SHOWN_BYTES = 16_384
#: Seconds between two reads of new warnings.
RELAY_S = 0.5


class _Copy(logging.Handler):
    """Appends each warning to the file in one write, because several processes write to it."""

    def __init__(self, path: str) -> None:
        super().__init__(logging.WARNING)
        self._path = path
        self.setFormatter(logging.Formatter("%(processName)s[%(process)d] %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = orjson.dumps(
                [record.levelno, self.format(record).encode(errors="replace").decode()]
            )
            # Without O_CREAT: a removed file stays removed.
            with os.fdopen(os.open(self._path, os.O_WRONLY | os.O_APPEND), "ab", 0) as file:
                file.write(line + b"\n")
        except OSError:
            self.handleError(record)


def copy_warnings() -> None:
    """Start to copy this engine process's warnings and errors to the worker's file."""
    if path := os.environ.get(VARIABLE):
        logging.getLogger("vllm").addHandler(_Copy(path))


class Warnings:
    """The worker's access to the file with the warnings and errors of one engine's processes.

    With `relay`, a thread logs them here, because vLLM's own log is not on the worker's stderr.
    """

    def __init__(self, *, relay: bool) -> None:
        handle, name = tempfile.mkstemp(prefix="warmq-engine-", suffix=".errors")
        os.close(handle)
        self._path = Path(name)
        self.processes: list[BaseProcess] = []
        os.environ[VARIABLE] = name
        self._logged = 0
        self._removed = threading.Event()
        self._thread = threading.Thread(target=self._relay, name="vllm-warnings", daemon=True)
        if relay:
            self._thread.start()

    def _relay(self) -> None:
        while not self._removed.wait(RELAY_S):
            self._log_new()
        self._log_new()

    def _log_new(self) -> None:
        new = self._bytes(self._logged)
        whole = new[: new.rfind(b"\n") + 1]
        self._logged += len(whole)
        for level, text in _records(whole):
            log.log(level, "%s", text, extra={"action": "engine_log"})

    def _bytes(self, start: int = 0) -> bytes:
        try:
            with self._path.open("rb") as file:
                file.seek(start)
                return file.read()
        except OSError:  # somebody has removed it
            return b""

    def read(self) -> str:
        """Return how processes ended, then their errors (the cause first); '' if unknown."""
        errors = (text for level, text in _records(self._bytes()) if level >= logging.ERROR)
        text = "\n".join(errors)[:SHOWN_BYTES]
        ended = [_ending(p.name, p.exitcode) for p in self.processes if p.exitcode]
        return "\n".join([*ended, text]).strip()

    def remove(self) -> None:
        """Log what is new, and remove the file."""
        self._removed.set()
        if self._thread.is_alive():
            self._thread.join()
        self._path.unlink(missing_ok=True)


def _records(lines: bytes) -> Iterator[tuple[int, str]]:
    """Yield level and text of each line, except lines that a full disk has cut."""
    for line in lines.splitlines():
        try:
            level, text = orjson.loads(line)
        except (ValueError, TypeError):
            continue
        yield level, text


def _ending(name: str, code: int) -> str:
    if code == -signal.SIGKILL:
        return f"{name} was killed by SIGKILL (out of memory, or by hand)"
    cause = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    return f"{name} ended {cause}"


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


class _Forward(logging.Handler):
    """Passes vLLM's warnings and errors in the worker's process to the worker's log."""

    def emit(self, record: logging.LogRecord) -> None:
        logging.root.handle(record)


def quieten() -> None:
    """Add the filter to vLLM's log handlers here, and in the worker forward its warnings."""
    logger = logging.getLogger("vllm")
    forwards = any(isinstance(one, _Forward) for one in logger.handlers)
    if engine_log.in_file() and multiprocessing.parent_process() is None and not forwards:
        logger.addHandler(_Forward(logging.WARNING))
    for handler in logger.handlers:
        handler.addFilter(ORDERLY_END)


# -- requests of a client that died --------------------------------------------------

#: The name of the call to EngineCore that aborts the requests of a dead client.
ABORT_CLIENT = "warmq_abort_client"
#: The module that defines vLLM's EngineCore.
CORE_MODULE = "vllm.v1.engine.core"


def abort_client(core: Any, client: int) -> int:
    """Abort all requests of one client of an EngineCore; return their number."""
    requests = core.scheduler.requests.values()
    request_ids = [one.request_id for one in requests if one.client_index == client]
    core.abort_requests(request_ids)
    return len(request_ids)


def add_abort_call() -> None:
    """Add the call to EngineCore, if this process has imported it."""
    if core := sys.modules.get(CORE_MODULE):
        setattr(core.EngineCore, ABORT_CLIENT, abort_client)


# -- answers that are bound to a schema ----------------------------------------------
# Before each step vLLM computes the tokens that each such request may have next. With more than 128
# of them it gives 16 neighbours each to up to 8 threads. Most masks take 0.1 ms or less, but the
# first token of a string takes 7 ms (vocabulary of 128,000), and neighbours have often come
# together, with the same schema: then one thread has all slow masks, and the device waits for it.

#: The module that computes the masks.
MASKS_MODULE = "vllm.v1.structured_output"
#: Requests whose masks a thread computes without a break (docs/evidence/measurements.md).
NEIGHBOURS = 1


def share_masks() -> None:
    """Distribute masks evenly among vLLM's threads, if this process has imported its manager."""
    if module := sys.modules.get(MASKS_MODULE):
        share = property(lambda _: NEIGHBOURS, lambda _, vllms_own: None)
        module.StructuredOutputManager.fill_bitmask_parallel_batch_size = share
