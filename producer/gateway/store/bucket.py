"""Files in a bucket, through obstore: S3, Google Cloud Storage, Azure, and what speaks like them.

Credentials and endpoint come from where these services' own tools look (AWS_ACCESS_KEY_ID,
AWS_ENDPOINT_URL, GOOGLE_SERVICE_ACCOUNT, AZURE_STORAGE_ACCOUNT_KEY, ...).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import BaseError
from obstore.store import from_url

from producer.gateway.store import StoreFailed

PIECE = 2**20
#: Bytes of a part of a multipart upload; S3 takes 5 MiB at least.
PART = 8 * 2**20


class _Writer:
    """Gathers parts; a bucket shows nothing of a file before it is closed."""

    def __init__(self, store: Any, name: str) -> None:
        self._file = obstore.open_writer(store, name, buffer_size=PART)
        self._size = 0
        self.committed = False

    def write(self, data: bytes) -> None:
        """Append."""
        try:
            self._file.write(data)
        except (BaseError, OSError) as error:
            raise _failed("written", error) from None
        self._size += len(data)

    def commit(self) -> int:
        """Complete the upload."""
        try:
            self._file.close()
        except (BaseError, OSError) as error:
            raise _failed("written", error) from None
        self.committed = True
        return self._size


class Bucket:
    """Files under the prefix of a URL such as s3://bucket/prefix."""

    def __init__(self, url: str) -> None:
        try:
            self._store: Any = from_url(url)
        except (BaseError, ValueError, TypeError) as error:
            raise StoreFailed(f"WARMQ_GATEWAY_STORE: {url}: {error}") from None

    @contextmanager
    def write(self, name: str) -> Iterator[_Writer]:
        """Begin a file; parts of one that is not committed stay until the bucket ends them."""
        writer = _Writer(self._store, name)
        yield writer

    def read(self, name: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Yield a file's bytes."""
        options: Any = {"range": {"offset": start} if end is None else (start, end)}
        if end is not None and end <= start:
            return
        try:
            for piece in obstore.get(self._store, name, options=options).stream(
                min_chunk_size=PIECE
            ):
                yield bytes(piece)
        except (BaseError, OSError) as error:
            raise _failed("read", error) from None

    def size(self, name: str) -> int | None:
        """Return a file's size."""
        try:
            return int(obstore.head(self._store, name)["size"])
        except FileNotFoundError:
            return None
        except (BaseError, OSError) as error:
            raise _failed("read", error) from None

    def delete(self, name: str) -> None:
        """Remove a file."""
        try:
            obstore.delete(self._store, name)
        except FileNotFoundError:
            return
        except (BaseError, OSError) as error:
            raise _failed("removed", error) from None

    @contextmanager
    def local(self, name: str) -> Iterator[Path]:
        """Give a copy in a temporary file."""
        with tempfile.NamedTemporaryFile(prefix="warmq-") as file:
            for piece in self.read(name):
                file.write(piece)
            file.flush()
            yield Path(file.name)

    def sweep(self, older_than_s: float, now: float) -> None:
        """Do nothing: unfinished uploads are ended by the bucket's own rule for them."""


def _failed(what: str, error: Exception) -> StoreFailed:
    return StoreFailed(f"a file cannot be {what} in the bucket: {error}")
