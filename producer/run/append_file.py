"""Appends complete windows (parts of the input) to a run's files, and sorts them at its end."""

import contextlib
import fcntl
import os
import stat
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Self

from contract.errors import BatchConflict
from contract.results import line_number
from producer.input.files import (
    BUFFER_BYTES,
    AtomicFile,
    OutputUnwritable,
    unwritable,
    write_failed,
)


def check_regular(path: Path) -> None:
    """Raise OutputUnwritable if the path exists and is not a regular file."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise unwritable(path, error) from None
    if not stat.S_ISREG(mode):
        raise OutputUnwritable(
            f"cannot write {path}: it is not a regular file, and a run can continue only "
            "regular files"
        )


class AppendFile:
    """A file for appending, locked by one process; closing undoes writes since the last `sync`."""

    def __init__(self, path: Path, *, new: bool = False) -> None:
        self.path = path
        self._buffer = bytearray()
        check_regular(path)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | (os.O_EXCL if new else 0)
        try:
            self._fd = os.open(path, flags, 0o666)
        except FileExistsError:  # created by another machine, whose locks may have no effect here
            raise BatchConflict(f"another run is writing {path}") from None
        except OSError as error:
            raise unwritable(path, error) from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._fd)
            if isinstance(error, BlockingIOError):
                raise BatchConflict(f"another run is writing {path}") from None
            raise OutputUnwritable(f"cannot lock {path}: {error.strerror}") from None
        self._written = self._synced = os.fstat(self._fd).st_size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # else the next run truncates the file
            if self._written > self._synced and not self._is_changed():
                os.ftruncate(self._fd, self._synced)
        os.close(self._fd)

    def continue_at(self, size: int, is_ours: Callable[[bytes], bool]) -> None:
        """Truncate the file to `size` bytes.

        Raises BatchConflict if the file is shorter, or if `is_ours` refuses the first line after
        `size` bytes.
        """
        if self._written < size:
            raise BatchConflict(
                f"results are missing: {self.path} has {self._written} bytes, and the run had "
                f"written {size}"
            )
        try:
            if self._written > size:
                with os.fdopen(os.dup(self._fd), "rb") as file:
                    file.seek(size)
                    if not is_ours(file.readline()):
                        raise BatchConflict(
                            f"{self.path} has more than the run has written: the run did not "
                            f"write what follows its first {size} bytes"
                        )
                os.ftruncate(self._fd, size)
        except OSError as error:
            raise unwritable(self.path, error) from None
        self._written = self._synced = size

    def write(self, data: bytes) -> None:
        """Append to the file."""
        self._buffer += data
        if len(self._buffer) >= BUFFER_BYTES:
            self._flush()

    def sync(self) -> int:
        """Flush to disk; return the file's size in bytes.

        Raises BatchConflict if another program changed the file.
        """
        self._flush()
        try:
            os.fsync(self._fd)
            is_changed = self._is_changed()
        except OSError as error:
            raise write_failed(self.path, error) from None
        if is_changed:
            raise BatchConflict(
                f"{self.path} was changed or removed while the run wrote it; put it back as "
                "it was, or remove it"
            )
        self._synced = self._written
        return self._synced

    def _flush(self) -> None:
        try:
            while self._buffer:
                count = os.write(self._fd, self._buffer)  # fewer bytes on a nearly full disk
                self._written += count
                del self._buffer[:count]
        except OSError as error:
            raise write_failed(self.path, error) from None

    def _is_changed(self) -> bool:
        """Return whether another program has replaced the file or changed its size."""
        state = os.fstat(self._fd)
        return not (
            state.st_size == self._written
            and self.path.exists()
            and os.path.samestat(state, self.path.stat())
        )


def sort_by_line(path: Path) -> None:
    """Sort a file of output lines by the numbers of their input lines.

    Sorting takes 24 bytes of memory for each line, and temporary disk space of the file's size.
    """
    numbers, starts = array("q"), array("q", [0])
    try:
        with path.open("rb") as file:
            for raw in file:
                numbers.append(line_number(raw))
                starts.append(starts[-1] + len(raw))
            import numpy as np  # noqa: PLC0415 - takes 0.1 s, and few runs need it

            order = np.frombuffer(numbers, dtype=np.int64)
            if not (order[1:] < order[:-1]).any():
                return
            with AtomicFile(path) as sorted_file:
                for at in np.argsort(order, kind="stable"):
                    file.seek(starts[at])
                    sorted_file.write(file.read(starts[at + 1] - starts[at]))
    except OSError as error:
        raise unwritable(path, error) from None
