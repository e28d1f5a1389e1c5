"""Files in a bucket, through obstore: S3, Google Cloud Storage, Azure, and what speaks like them.

Credentials and endpoint come from where these services' own tools look (AWS_ACCESS_KEY_ID,
AWS_ENDPOINT_URL, GOOGLE_SERVICE_ACCOUNT, AZURE_STORAGE_ACCOUNT_KEY, ...); an endpoint without TLS
needs AWS_ALLOW_HTTP=true.
"""

from __future__ import annotations

import logging
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import BaseError
from obstore.store import from_url

from gateway.store import StoreFailed, checked_name
from producer.input.places.bucket import told

log = logging.getLogger(__name__)

PIECE = 2**20
#: Bytes of a part of a multipart upload; S3 takes 5 MiB at least.
PART = 8 * 2**20
#: Parts of one file that are under way at once; each is held in memory.
_AT_ONCE = 4
#: Bytes of one read. None stays open while a client is slow: obstore ends what takes over 30 s.
_RANGE = 8 * 2**20
#: obstore's own figures are 10 tries in 180 s: by then a client has long gone.
_RETRIES: Any = {"max_retries": 5, "retry_timeout": timedelta(seconds=20)}


class _Writer:
    """Gathers parts; a bucket shows nothing of a file before it is closed."""

    def __init__(self, store: Any, name: str) -> None:
        self._file = obstore.open_writer(store, name, buffer_size=PART, max_concurrency=_AT_ONCE)
        self._size = 0
        self._committed = False

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
        self._committed = True
        return self._size

    def close(self) -> None:
        """End the upload, if it was not committed: the bucket forgets its parts."""
        if self._committed:
            return
        try:
            gone = StoreFailed("not committed")
            self._file.__exit__(StoreFailed, gone, None)  # with an error it ends, and keeps nothing
        except (BaseError, OSError) as error:  # the bucket is away: its own rule removes them
            log.warning(
                "parts of an unfinished file stay in the bucket: %s",
                told(error),
                extra={"action": "parts_left"},
            )


#: Written and removed at the start.
_PROBE = "warmq-probe"


class Bucket:
    """Files under the prefix of a URL such as s3://bucket/prefix."""

    def __init__(self, url: str) -> None:
        try:
            self._store: Any = from_url(url, retry_config=_RETRIES)
            # Found out now, not by the first client. Gateways that start together have a name each:
            # Google and Azure tell the second one to remove an object that it is not there.
            probe = f"{_PROBE}-{secrets.token_hex(8)}"
            obstore.put(self._store, probe, b"")
            with suppress(FileNotFoundError):  # a rule of the bucket, or a retry, was faster
                obstore.delete(self._store, probe)
        except (BaseError, OSError, ValueError, TypeError) as error:
            raise StoreFailed(
                f"WARMQ_GATEWAY_STORE: {url} cannot be used: {told(error)}; name a bucket that can "
                "be written to, and give its credentials in the environment"
            ) from None

    @contextmanager
    def write(self, name: str) -> Iterator[_Writer]:
        """Begin a file."""
        writer = _Writer(self._store, checked_name(name))
        try:
            yield writer
        finally:
            writer.close()

    def read(self, name: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Yield a file's bytes."""
        if end is None:
            end = self.size(name)
            if end is None:
                raise StoreFailed("a file cannot be read: the bucket has none of its name")
        for at in range(start, end, _RANGE):
            until = min(at + _RANGE, end)
            try:
                found = memoryview(obstore.get_range(self._store, name, start=at, end=until))
            except (BaseError, OSError) as error:
                raise _failed("read", error) from None
            for piece in range(0, len(found), PIECE):
                yield bytes(found[piece : piece + PIECE])

    def size(self, name: str) -> int | None:
        """Return a file's size."""
        try:
            return int(obstore.head(self._store, checked_name(name))["size"])
        except FileNotFoundError:
            return None
        except (BaseError, OSError) as error:
            raise _failed("read", error) from None

    def delete(self, name: str) -> None:
        """Remove a file."""
        try:
            obstore.delete(self._store, checked_name(name))
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
    return StoreFailed(f"a file cannot be {what} in the bucket: {told(error)}")
