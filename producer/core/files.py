"""Output files that are there whole or not at all, and never one for two purposes."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path
from types import TracebackType
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


def errors_beside(output: str) -> Path:
    """Return the error file of an output file that comes without one."""
    path = Path(output)
    return path.with_name(f"{path.stem}.errors{path.suffix or '.jsonl'}")


def check_outputs(
    output: str | None, errors: str | None, file: str | None = None, journal: Path | None = None
) -> None:
    """Refuse one file under two names, also through links and standard streams.

    Terminals and other character devices may have many names: nothing in them can be lost.

    Args:
        output: where results go; None or `-` is stdout.
        errors: where failed requests go; None is where `write` puts them.
        file: the input; `-` is stdin.
        journal: of a run.

    Raises:
        OutputUnwritable: names the two.
    """
    output = output or "-"
    beside = None if output == "-" else errors_beside(output)
    known: dict[object, str] = {}
    for purpose, name, standard in (
        ("the input", file, 0), ("the output", output, 1),
        ("the error file", errors or beside, 1), ("the journal", journal, 1),
    ):  # fmt: skip
        place = _place(name, standard) if name is not None else None
        if place in known:
            raise OutputUnwritable(
                f"{known[place]} and {purpose} are the same file, {name}; name another"
            )
        if place is not None:
            known[place] = purpose


def _place(name: str | Path, standard: int) -> object:
    """Return what is equal for two names of one file; None for what many may share."""
    try:
        state = os.fstat(standard) if name == "-" else Path(name).stat()
    except OSError:
        return os.path.realpath(name)  # not there yet
    if stat.S_ISCHR(state.st_mode) or (name == "-" and not stat.S_ISREG(state.st_mode)):
        return None
    return state.st_dev, state.st_ino


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
                self.discard()
            raise unwritable(self.path, error) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if kind is None:
            self.commit()
        else:
            self.discard()

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

    def commit(self) -> None:
        """Put the file in its place, on disk before it is visible there."""
        try:
            self.sync()
            self._file.close()
            if self._temporary is not None:
                self._temporary.replace(self.path)
                self._temporary = None
        except OSError as error:
            raise write_failed(self.path, error) from None
        finally:
            self.discard()  # nothing is left to be discarded if all went well

    def discard(self) -> None:
        """Forget what was written."""
        if self._temporary is not None:
            self._temporary.unlink(missing_ok=True)
            self._temporary = None
        try:
            self._file.close()
        except OSError:
            return  # what could not be flushed was to be thrown away
