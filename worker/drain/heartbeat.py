"""Writes the heartbeat file: it shows that the drain's event loop runs, and the worker's state.

The file is also written while Redis is unreachable and while the engine starts. Only a blocked
event loop, or the end of the process, stops its updates.
"""

import asyncio
import contextlib
import logging
from pathlib import Path

from contract.settings import SettingsError
from worker.drain.drain import Drain
from worker.drain.lifecycle import State

log = logging.getLogger(__name__)

#: Seconds between two writes of the file.
EVERY_S = 1.0


class NotAFileError(Exception):
    """The path is not a regular file but a folder, a device or a link; it is not replaced."""


def write_starting(file: str | None) -> None:
    """Write `starting` over an earlier process's state, before the event loop runs.

    If the file cannot be written, `beat` logs that later.

    Raises:
        SettingsError: the path is not a regular file.
    """
    if file is not None:
        try:
            with contextlib.suppress(OSError):
                _write(Path(file), State.STARTING)
        except NotAFileError as error:
            raise SettingsError(f"WARMQ_HEARTBEAT_FILE: {error}") from None


async def beat(drain: Drain) -> None:
    """Write the worker's state to WARMQ_HEARTBEAT_FILE every second; log the first failure."""
    if drain.settings.heartbeat_file is None:
        return
    file = Path(drain.settings.heartbeat_file)
    logged = False
    while True:
        try:
            _write(file, drain.lifecycle.state)
            logged = False
        except (OSError, NotAFileError) as error:
            if not logged:
                log.warning(
                    "WARMQ_HEARTBEAT_FILE: %s; name a file in a folder that this user may write",
                    error, extra={"action": "heartbeat_failed"},
                )  # fmt: skip
            logged = True
        await asyncio.sleep(EVERY_S)


def _write(file: Path, state: State) -> None:
    """Replace the file atomically by one line with the state."""
    if file.is_symlink() or (file.exists() and not file.is_file()):
        raise NotAFileError(f"{file} is not a regular file, but a folder, a device or a link")
    temporary = file.with_name(f"{file.name}.part")
    temporary.write_text(f"{state.value}\n")
    temporary.replace(file)
