"""Sends vLLM's log, and its processes' output, to the file WARMQ_ENGINE_LOG.

Warnings and errors also go to the worker's log (vllm/processes.py). Imports nothing of vLLM.
"""

import multiprocessing
import os
import stat
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import TextIO

from contract.settings import SettingsError
from worker.engine.parent_death import ENGINE_LOG

#: The value of the setting that leaves vLLM's log in the worker's own.
IN_WORKERS_LOG = "-"
#: vLLM's variable for the stream of its log, and our value: `ext://` names an object to import.
_STREAM, _OUR_STREAM = "VLLM_LOGGING_STREAM", f"ext://{__name__}.STREAM"


def choose(setting: str | None, log_format: str, workers_log: str | None) -> str:
    """Return the absolute path of the engine's log, or `-`; create the file.

    Without a setting the file is next to the worker's log: the file `workers_log`, or the file to
    which stderr goes. If neither is a file, or the folder cannot be written, the file is in the
    current folder, or in the folder for temporary files. A worker that logs as JSON keeps all lines
    in one log.

    Raises:
        SettingsError: the file that the setting names cannot be written.
    """
    if setting == IN_WORKERS_LOG or (setting is None and log_format == "json"):
        return IN_WORKERS_LOG
    if setting is not None:
        try:
            _create(Path(setting))
        except OSError as error:
            raise SettingsError(
                f"WARMQ_ENGINE_LOG: {setting} cannot be written: {error.strerror}; name a file, or "
                f"{IN_WORKERS_LOG} for the worker's own log"
            ) from None
        return str(Path(setting).absolute())
    log = Path(workers_log or _file_of_stderr() or "worker.log")
    name = f"{log.stem}.engine{log.suffix or '.log'}"
    for folder in (log.parent, Path()):
        try:
            _create(folder / name)
        except OSError:
            continue
        return str((folder / name).absolute())
    handle, path = tempfile.mkstemp(prefix="warmq-", suffix=".engine.log")
    os.close(handle)
    return path


def _create(file: Path) -> None:
    with file.open("a"):
        pass


def _file_of_stderr() -> str | None:
    """Return the path of the file to which this process's stderr goes; None if it is no file."""
    try:
        path = os.readlink("/proc/self/fd/2")  # noqa: PTH115 - the link's text, without a check
        stderr = os.fstat(2)
        is_file = stat.S_ISREG(stderr.st_mode) and os.path.samestat(stderr, os.stat(path))  # noqa: PTH116
    except OSError:
        return None
    return path if is_file else None


def use(path: str) -> None:
    """Send the log of vLLM, which is not imported yet, and of its processes to this file."""
    os.environ[ENGINE_LOG] = path
    os.environ.setdefault(_STREAM, _OUR_STREAM)


def in_file() -> bool:
    """Whether vLLM's log in this process goes to the file of `use`."""
    return ENGINE_LOG in os.environ and os.environ.get(_STREAM) == _OUR_STREAM


@cache
def _file() -> TextIO:
    file = Path(os.environ[ENGINE_LOG])
    return file.open("a", 1, encoding="utf-8", errors="backslashreplace")


def __getattr__(name: str) -> TextIO:
    """Return STREAM: the file; in an engine process its stdout, to which vLLM adds prefixes."""
    if name != "STREAM":
        raise AttributeError(name)
    return _file() if multiprocessing.parent_process() is None else sys.stdout
