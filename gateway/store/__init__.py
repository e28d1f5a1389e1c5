"""Where files' contents are: a folder, or a bucket of S3, Google Cloud or Azure.

Names are the gateway's own (`file-<hex>`), never a client's.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from contract.errors import WarmqError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,199}")


class StoreFailed(WarmqError):
    """A file cannot be written or read: the operator must make room or give rights."""

    code = "file_store_failed"


class Writer(Protocol):
    """A file that is being written; without `commit` nothing of it stays."""

    def write(self, data: bytes) -> None:
        """Append; raises StoreFailed, as on a full disk."""

    def commit(self) -> int:
        """Make the file visible, on disk when this returns; return its size in bytes."""


class Store(Protocol):
    """Files by name. All calls may come from several threads, and raise StoreFailed."""

    def write(self, name: str) -> AbstractContextManager[Writer]:
        """Begin a file; one of the same name is replaced by the commit."""

    def read(self, name: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Yield the bytes from `start` up to `end` (exclusive) in pieces of 1 MiB at most."""

    def size(self, name: str) -> int | None:
        """Return a file's size in bytes, None if there is none."""

    def delete(self, name: str) -> None:
        """Remove a file, if it is there."""

    def local(self, name: str) -> AbstractContextManager[Path]:
        """Give a path that can be read while the context is open."""

    def sweep(self, older_than_s: float, now: float) -> None:
        """Remove what writers that died have left unfinished, unless it was touched lately."""


def checked_name(name: str) -> str:
    """Return a file's name; raise ValueError for one that could lead out of the store."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"not a name of a stored file: {name!r}")
    return name


def open_store(url: str) -> Store:
    """Return the store at a folder's path or at the URL of a bucket.

    Raises:
        StoreFailed: the folder cannot be made or written to, or the URL names no bucket.
    """
    if "://" in url:
        try:
            from gateway.store.bucket import Bucket  # noqa: PLC0415 - not everybody has it
        except ImportError as error:
            raise StoreFailed(
                f"WARMQ_GATEWAY_STORE: {url} needs obstore ({error}): pip install 'warmq[gateway]'"
            ) from None
        return Bucket(url)
    from gateway.store.folder import Folder  # noqa: PLC0415 - as the other

    return Folder(Path(url))


def lines_of(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a file that is read in pieces, without those that are blank."""
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        yield from filter(bytes.strip, whole)
    if rest.strip():
        yield rest
