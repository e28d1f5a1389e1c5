"""Files in a folder: written under a temporary name, brought to disk, then renamed."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gateway.store import StoreFailed, checked_name

PIECE = 2**20
_UNFINISHED = ".part"


class _Writer:
    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / name
        self._part = folder / f"{name}.{secrets.token_hex(4)}{_UNFINISHED}"
        self._file = self._part.open("xb", buffering=0)
        self._size = 0

    def write(self, data: bytes) -> None:
        """Append."""
        left = memoryview(data)
        try:
            while left:  # a disk that gets full takes a part
                left = left[self._file.write(left) :]
        except OSError as error:
            raise _failed("written", error) from None
        self._size += len(data)

    def commit(self) -> int:
        """Bring it to disk, and to its name."""
        try:
            os.fsync(self._file.fileno())
            self._file.close()
            self._part.replace(self._path)
            folder = os.open(self._path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)  # the name too
            finally:
                os.close(folder)
        except OSError as error:
            raise _failed("written", error) from None
        return self._size

    def close(self) -> None:
        """Remove what was not committed."""
        with suppress(OSError):
            self._file.close()
        self._part.unlink(missing_ok=True)


class Folder:
    """A folder of files, each in a file of its name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreFailed(
                f"WARMQ_GATEWAY_STORE: {folder} cannot be used: {error.strerror}; name a folder "
                "that can be written to"
            ) from None
        if not os.access(folder, os.W_OK | os.X_OK):
            raise StoreFailed(f"WARMQ_GATEWAY_STORE: {folder} cannot be written to")

    def _path(self, name: str) -> Path:
        return self._folder / checked_name(name)

    @contextmanager
    def write(self, name: str) -> Iterator[_Writer]:
        """Begin a file."""
        self._path(name)
        try:
            writer = _Writer(self._folder, name)
        except OSError as error:
            raise _failed("written", error) from None
        try:
            yield writer
        finally:
            writer.close()

    def read(self, name: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Yield a file's bytes."""
        try:
            with self._path(name).open("rb", buffering=0) as file:
                file.seek(start)
                left = (2**63 if end is None else end) - start
                while left > 0 and (piece := file.read(min(PIECE, left))):
                    left -= len(piece)
                    yield piece
        except OSError as error:
            raise _failed("read", error) from None

    def size(self, name: str) -> int | None:
        """Return a file's size."""
        try:
            return self._path(name).stat().st_size
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _failed("read", error) from None

    def delete(self, name: str) -> None:
        """Remove a file."""
        try:
            self._path(name).unlink(missing_ok=True)
        except OSError as error:
            raise _failed("removed", error) from None

    @contextmanager
    def local(self, name: str) -> Iterator[Path]:
        """Give the file itself."""
        yield self._path(name)

    def sweep(self, older_than_s: float, now: float) -> None:
        """Remove what writers that died have left unfinished, unless it was touched lately."""
        for part in self._folder.glob(f"*{_UNFINISHED}"):
            with suppress(OSError):
                if now - part.stat().st_mtime > older_than_s:
                    part.unlink(missing_ok=True)


def _failed(what: str, error: OSError) -> StoreFailed:
    return StoreFailed(f"a file cannot be {what}: {error.strerror}")
