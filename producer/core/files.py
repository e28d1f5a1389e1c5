"""Output files that appear when they are complete, or not at all."""

import os
import secrets
import stat
from pathlib import Path
from typing import BinaryIO, Self

from contract.errors import WarmqError

#: Written at once to a file that nobody reads before it is whole.
BUFFER_BYTES = 2**20


class OutputUnwritable(WarmqError):
    """A result file cannot be written: its owner must name another or give rights."""

    code = "output_unwritable"


class WriteFailed(OutputUnwritable):
    """Writing ended half-way, as on a full disk: its owner must make room and start again."""


def unwritable(path: str | Path, error: OSError) -> OutputUnwritable:
    """Return the error for a file that cannot be opened."""
    return OutputUnwritable(f"cannot write {path}: {error.strerror}")


def write_failed(path: str | Path, error: OSError) -> WriteFailed:
    """Return the error for a file that could be opened, and cannot be written to its end."""
    return WriteFailed(f"cannot write {path}: {error.strerror}; make room there, or name another")


class AtomicFile:
    """Written beside its place and renamed at the end; a failure leaves the place as it was.

    What is no regular file (a pipe, /dev/stdout) is written to directly.
    """

    def __init__(self, name: str | Path) -> None:
        self.path = Path(os.path.realpath(name))  # a link stays, its target is replaced
        self._temporary: Path | None = None
        self._file: BinaryIO
        try:
            mode = self.path.stat().st_mode if self.path.exists() else None
            if mode is not None and not stat.S_ISREG(mode):
                self._file = self.path.open("wb")
                return
            beside = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}.part")
            self._file = beside.open("xb", BUFFER_BYTES)
            self._temporary = beside
            if mode is not None:
                beside.chmod(stat.S_IMODE(mode))
        except OSError as error:
            if self._temporary is not None:
                self._discard()
            raise unwritable(self.path, error) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.sync()  # on disk before it is visible in its place
                self._file.close()
                if self._temporary is not None:
                    self._temporary.replace(self.path)
                    self._temporary = None
        except OSError as error:
            raise write_failed(self.path, error) from None
        finally:
            self._discard()  # nothing is left to be discarded if all went well

    def write(self, data: bytes) -> None:
        """Append to the file."""
        try:
            self._file.write(data)
        except OSError as error:
            raise write_failed(self.path, error) from None

    def sync(self) -> None:
        """Bring what was written to disk; what can fail for want of room fails here."""
        try:
            self._file.flush()
            if self._temporary is not None:
                os.fsync(self._file.fileno())
        except OSError as error:
            raise write_failed(self.path, error) from None

    def _discard(self) -> None:
        if self._temporary is not None:
            self._temporary.unlink(missing_ok=True)
            self._temporary = None
        try:
            self._file.close()
        except OSError:
            return  # what could not be flushed was to be thrown away
