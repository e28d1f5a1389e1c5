"""Output files that appear when they are complete, or not at all."""

import errno
import filecmp
import os
import secrets
import stat
from pathlib import Path
from typing import BinaryIO, Self

from contract.errors import BatchConflict, WarmqError

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


def check_writable(path: Path) -> None:
    """Raise OutputUnwritable unless AtomicFile could write a file of that name; creates nothing."""
    if path.is_dir():
        raise OutputUnwritable(f"cannot write {path}: it is a folder; name a file in it")
    folder = Path(os.path.realpath(path)).parent
    if not folder.is_dir():
        raise OutputUnwritable(
            f"cannot write {path}: there is no folder {folder}; make it, or name another"
        )
    name = _beside(Path(os.path.realpath(path))).name
    if len(os.fsencode(name)) > os.pathconf(folder, "PC_NAME_MAX"):
        raise OutputUnwritable(f"cannot write {path}: File name too long")
    # A file is replaced by one that was written beside it; anything else is written to.
    needed = folder if not path.exists() or path.is_file() else path
    if not os.access(needed, os.W_OK | (os.X_OK if needed is folder else 0)):
        raise OutputUnwritable(f"cannot write {path}: Permission denied")


def _beside(path: Path) -> Path:
    """Return a name for a file until it is complete."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")


def _linked(complete: Path, path: Path) -> bool:
    """Give a file a second name that is new; False where the folder has no second names, and the
    name is taken by an empty file.

    Raises:
        FileExistsError: there is a file of that name.
    """
    try:
        path.hardlink_to(complete)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
        path.open("xb").close()
        return False
    return True


class AtomicFile:
    """Written beside its place and renamed at the end; a failure leaves the place as it was.

    What is no regular file (a pipe, /dev/stdout) is written to directly. A `new` one replaces no
    file: its folder decides which of two writers is the first, where locks do not reach, too. Then
    leaving raises BatchConflict, unless what is there has the same content.
    """

    def __init__(self, name: str | Path, *, new: bool = False) -> None:
        self.path = Path(os.path.realpath(name))  # a link stays, its target is replaced
        self._new = new
        self._temporary: Path | None = None
        self._file: BinaryIO
        try:
            mode = self.path.stat().st_mode if self.path.exists() else None
            if mode is not None and not stat.S_ISREG(mode):
                self._file = self.path.open("wb")
                return
            beside = _beside(self.path)
            try:
                self._file = beside.open("xb", BUFFER_BYTES)
                self._temporary = beside
                if mode is not None:
                    beside.chmod(stat.S_IMODE(mode))
            except (KeyboardInterrupt, SystemExit):  # a signal, which came when it was there
                beside.unlink(missing_ok=True)
                raise
        except OSError as error:
            if self._temporary is not None:
                self.discard()
            raise unwritable(self.path, error) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.sync()  # on disk before it is visible in its place
                self._file.close()
                if self._temporary is not None:
                    self._appear(self._temporary)
        except OSError as error:
            raise write_failed(self.path, error) from None
        finally:
            self.discard()  # nothing is left to be discarded if all went well

    def _appear(self, complete: Path) -> None:
        try:
            if self._new and _linked(complete, self.path):
                return
        except FileExistsError:
            if filecmp.cmp(complete, self.path, shallow=False):
                return  # written before, and killed before anybody was told
            raise BatchConflict(
                f"{self.path} was written by somebody else meanwhile, and is left as it is; move "
                "it away, and the same command brings its results there"
            ) from None
        complete.replace(self.path)
        self._temporary = None

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

    def discard(self) -> None:
        """Leave the place as it was; what was written is lost."""
        if self._temporary is not None:
            self._temporary.unlink(missing_ok=True)
            self._temporary = None
        try:
            self._file.close()
        except OSError:
            return  # what could not be flushed was to be thrown away
