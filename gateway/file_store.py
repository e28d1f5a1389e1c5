"""Stores files' contents in a folder or a bucket (S3, Google Cloud, Azure).

Names are the gateway's own (such as `file-<hex>`), never a client's. Credentials of buckets come
from the environment (producer/input/bucket.py).
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import tempfile
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from contract.errors import WarmqError
from producer.input.bucket import RETRIES, bucket_errors, error_text
from producer.input.files import UNFINISHED, AtomicFile, ObjectFile, OutputUnwritable

log = logging.getLogger(__name__)

#: Most bytes of a file that are read at a time.
PIECE = 2**20
#: Bytes that one request reads from a bucket. obstore ends a request after 30 s, and a request for
#: a whole file would last as long as a slow client reads.
_RANGE = 8 * 2**20
#: Pieces of one file that are sent to a bucket concurrently.
_AT_ONCE = 4
#: Prefix of an object that is written to a bucket and removed at the start, to check credentials.
_PROBE = "warmq-probe"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,199}")


class FileStoreFailed(WarmqError):
    """A file cannot be written or read: the operator must free space or give permissions."""

    code = "file_store_failed"


class Writer:
    """A file that is being written; it is removed unless `commit` is called."""

    def __init__(self, target: AtomicFile | ObjectFile, where: str, name: str) -> None:
        self.name = name
        self._target, self._where = target, where
        self._size = 0

    def write(self, data: bytes) -> None:
        with _write_errors(self._where):
            self._target.write(data)
        self._size += len(data)

    def commit(self) -> int:
        """Store the file durably and make it visible; return its size in bytes."""
        with _write_errors(self._where):
            self._target.commit()
        return self._size

    def close(self) -> None:
        """Remove the file unless it was committed."""
        if left := self._target.discard():
            message = "parts of an unfinished file stay in the bucket: %s"
            log.warning(message, left, extra={"action": "parts_left"})


class FileStore(ABC):
    """Stores files by name. Calls are thread-safe, and raise FileStoreFailed."""

    #: The place of the files in error messages, and the errors that reading and deleting raise.
    where = ""
    errors: tuple[type[Exception], ...] = (OSError,)

    @contextmanager
    def write(self, name: str) -> Iterator[Writer]:
        """Open a file for writing; its commit replaces a file of the same name."""
        checked_name(name)
        with _write_errors(self.where):
            writer = Writer(self._begin_file(name), self.where, name)
        try:
            yield writer
        finally:
            writer.close()

    @asynccontextmanager
    async def writing(self, name: str) -> AsyncIterator[Writer]:
        """Write a file as `write` does, from an event loop."""
        context = self.write(name)
        writer = await asyncio.to_thread(context.__enter__)
        try:
            yield writer
        finally:
            await asyncio.to_thread(context.__exit__, None, None, None)

    @abstractmethod
    def _begin_file(self, name: str) -> AtomicFile | ObjectFile: ...

    def read(self, name: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Yield the bytes from `start` up to `end` (exclusive) in pieces of at most PIECE."""
        checked_name(name)
        with self._translated("read"):
            yield from self._pieces(name, start, end)

    @abstractmethod
    def _pieces(self, name: str, start: int, end: int | None) -> Iterator[bytes]: ...

    def size(self, name: str) -> int | None:
        checked_name(name)
        with self._translated("read"), suppress(FileNotFoundError):
            return self._size(name)
        return None

    @abstractmethod
    def _size(self, name: str) -> int: ...

    def delete(self, name: str) -> None:
        checked_name(name)
        with self._translated("removed"), suppress(FileNotFoundError):
            self._delete(name)

    @abstractmethod
    def _delete(self, name: str) -> None: ...

    @abstractmethod
    def local(self, name: str) -> AbstractContextManager[Path]:
        """Provide the file at a local path while the context is open."""

    @abstractmethod
    def remove_unfinished(self, older_than_s: float, now: float) -> None:
        """Remove unfinished files older than `older_than_s` seconds, whose writers have died."""

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except self.errors as error:
            why = getattr(error, "strerror", None) or error_text(error)
            raise FileStoreFailed(
                f"WARMQ_GATEWAY_STORE: a file cannot be {what}{self.where}: {why}"
            ) from None


class Folder(FileStore):
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FileStoreFailed(
                f"WARMQ_GATEWAY_STORE: {folder} cannot be used: {error.strerror}; name a folder "
                "that can be written to"
            ) from None
        if not os.access(folder, os.W_OK | os.X_OK):
            raise FileStoreFailed(f"WARMQ_GATEWAY_STORE: {folder} cannot be written to")

    def _begin_file(self, name: str) -> AtomicFile:
        return AtomicFile(self._folder / name, durable=True)

    def _pieces(self, name: str, start: int, end: int | None) -> Iterator[bytes]:
        with (self._folder / name).open("rb", buffering=0) as file:
            file.seek(start)
            left = (2**63 if end is None else end) - start
            while left > 0 and (piece := file.read(min(PIECE, left))):
                left -= len(piece)
                yield piece

    def _size(self, name: str) -> int:
        return (self._folder / name).stat().st_size

    def _delete(self, name: str) -> None:
        (self._folder / name).unlink()

    @contextmanager
    def local(self, name: str) -> Iterator[Path]:
        yield self._folder / checked_name(name)

    def remove_unfinished(self, older_than_s: float, now: float) -> None:
        for unfinished in self._folder.glob(f"*{UNFINISHED}"):
            with suppress(OSError):
                if now - unfinished.stat().st_mtime > older_than_s:
                    unfinished.unlink(missing_ok=True)


class Bucket(FileStore):
    """Stores files under the prefix of a URL such as s3://bucket/prefix."""

    where = " in the bucket"

    def __init__(self, url: str) -> None:
        try:
            import obstore  # noqa: PLC0415 - an optional extra
            from obstore.store import from_url  # noqa: PLC0415
        except ImportError as error:
            raise FileStoreFailed(
                f"WARMQ_GATEWAY_STORE: {url} needs obstore ({error}): pip install 'warmq[gateway]'"
            ) from None
        self._url, self._obs, self.errors = url, obstore, bucket_errors()
        wrong: tuple[type[Exception], ...] = (*self.errors, TypeError)
        try:
            self._store: Any = from_url(url, retry_config=RETRIES)
            # Each gateway writes its own object: if two deleted the same one, Google and Azure
            # would report to the second that the object is missing.
            probe = f"{_PROBE}-{secrets.token_hex(8)}"
            obstore.put(self._store, probe, b"")
            with suppress(FileNotFoundError):  # a lifecycle rule or a retry has deleted it
                obstore.delete(self._store, probe)
        except wrong as error:
            raise FileStoreFailed(
                f"WARMQ_GATEWAY_STORE: {url} cannot be used: {error_text(error)}; "
                "name a bucket that can "
                "be written to, and give its credentials in the environment"
            ) from None

    def _begin_file(self, name: str) -> ObjectFile:
        return ObjectFile(self._url, opened=(self._store, name), at_once=_AT_ONCE)

    def _pieces(self, name: str, start: int, end: int | None) -> Iterator[bytes]:
        end = self._size(name) if end is None else end
        for at in range(start, end, _RANGE):
            until = min(at + _RANGE, end)
            content = memoryview(self._obs.get_range(self._store, name, start=at, end=until))
            for piece in range(0, len(content), PIECE):
                yield bytes(content[piece : piece + PIECE])

    def _size(self, name: str) -> int:
        return int(self._obs.head(self._store, name)["size"])

    def _delete(self, name: str) -> None:
        self._obs.delete(self._store, name)

    @contextmanager
    def local(self, name: str) -> Iterator[Path]:
        with tempfile.NamedTemporaryFile(prefix="warmq-") as file:
            for piece in self.read(name):
                file.write(piece)
            file.flush()
            yield Path(file.name)

    def remove_unfinished(self, older_than_s: float, now: float) -> None:
        """Do nothing: the bucket's lifecycle rule removes unfinished uploads."""


@contextmanager
def _write_errors(where: str) -> Iterator[None]:
    try:
        yield
    except OutputUnwritable as error:
        why = error.facts["why"]
        raise FileStoreFailed(
            f"WARMQ_GATEWAY_STORE: a file cannot be written{where}: {why}"
        ) from None


def checked_name(name: str) -> str:
    """Return a file's name; raise ValueError if it could leave the store's folder."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"not a name of a stored file: {name!r}")
    return name


def open_store(url: str) -> FileStore:
    """Return the store at a folder's path or a bucket's URL; raise FileStoreFailed."""
    return Bucket(url) if "://" in url else Folder(Path(url))


def lines_of(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a file that is read in pieces; skip blank lines."""
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        yield from filter(bytes.strip, whole)
    if rest.strip():
        yield rest
