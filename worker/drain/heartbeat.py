"""A file that says that the drain's loop turns, and what the worker is doing.

For whoever restarts what hangs, as Kubernetes does: Redis may be away and the engine may be
starting for an hour, and the file is written all the same, since both are awaited. Only a loop that
no longer turns, or a process that is gone, lets it grow old.
"""

import asyncio
import contextlib
import logging
from pathlib import Path

from contract.settings import SettingsError
from worker.drain.drain import Drain
from worker.drain.lifecycle import State

log = logging.getLogger(__name__)

#: How often the file is written, in seconds.
EVERY_S = 1.0


class NoFileError(Exception):
    """What has the file's name is no file: it is left as it is."""


def write_starting(file: str | None) -> None:
    """Write `starting` over what a process before this one left, long before the loop runs.

    The file outlives a process that was killed, and a container. If it cannot be written, `beat`
    says so.

    Raises:
        SettingsError: something other than a file has the name.
    """
    if file is not None:
        try:
            with contextlib.suppress(OSError):
                _write(Path(file), _line(State.STARTING))
        except NoFileError as error:
            raise SettingsError(f"WARMQ_HEARTBEAT_FILE: {error}") from None


async def beat(drain: Drain) -> None:
    """Write the worker's state and a line break to WARMQ_HEARTBEAT_FILE every second, if it is set.

    The file takes its place whole, so that nobody reads half of a word. One that cannot be written
    is told once: the worker goes on, and is restarted by whoever reads the file.
    """
    if drain.settings.heartbeat_file is None:
        return
    file = Path(drain.settings.heartbeat_file)
    told = False
    while True:
        try:
            _write(file, _line(drain.lifecycle.state))
            told = False
        except (OSError, NoFileError) as error:
            if not told:
                log.warning(
                    "WARMQ_HEARTBEAT_FILE: %s; name a file in a folder that this user may write",
                    error, extra={"action": "heartbeat_failed"},
                )  # fmt: skip
            told = True
        await asyncio.sleep(EVERY_S)


def _line(state: State) -> str:
    return f"{state.value}\n"


def _write(file: Path, text: str) -> None:
    """Write a text to a file; whoever reads it reads the one before, or this one.

    Raises:
        NoFileError: a folder, a device or a link has its name, and keeps it.
    """
    if file.is_symlink() or (file.exists() and not file.is_file()):
        raise NoFileError(f"{file} is a folder, a device or a link, and no file")
    part = file.with_name(f"{file.name}.part")
    part.write_text(text)
    part.replace(file)
