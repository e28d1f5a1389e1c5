"""An object of a bucket that is written: it appears when it is complete, or not at all.

Its parts go up while it is written. Killed half-way it leaves nothing that anybody sees; the parts
that are left over are removed by the bucket's own rule for unfinished uploads.
"""

from __future__ import annotations

from typing import Any, Self

from producer.core.files import OutputUnwritable, WriteFailed
from producer.core.places.bucket import (
    credentials,
    errors_of_bucket,
    is_web,
    obstore,
    open_bucket,
    shown,
    told,
)

#: Bytes of a part of an upload at the least; so many are under way at once.
_PART, _AT_ONCE = 8 * 2**20, 2
#: S3 takes 10,000 parts. Half of them are enough for what is expected: a table of results, which
#: has the texts twice, may be larger than the lines that it is made of.
_PARTS, _MIB = 5_000, 2**20


def part_bytes(expected: int) -> int:
    """Return the size of the parts of an object of about so many bytes."""
    return max(_PART, -(-expected // (_PARTS * _MIB)) * _MIB)


def check_object(url: str) -> None:
    """Ask the bucket for an object of that name, which need not be there.

    Raises:
        OutputUnwritable: the bucket is not there or refuses, or the URL can only be read.
        BadPlace, ExtraMissing: as `open_bucket` does.
    """
    if is_web(url):
        raise OutputUnwritable(f"cannot write {shown(url)}: give s3://, gs:// or az://, or a file")
    store, key = open_bucket(url)
    if not key or key.endswith("/"):
        raise OutputUnwritable(f"cannot write {url}: it names no object; add its name")
    try:
        list(obstore(url).list(store, prefix=key, chunk_size=1))
    except errors_of_bucket() as error:
        raise OutputUnwritable(f"cannot write {url}: {told(error)}; {credentials(url)}") from None


class ObjectFile:
    """Written part by part and completed at the end; a failure leaves the place as it was.

    `expected` says of what may have more than 40 GB how many bytes those are: the parts of an
    upload are all of one size (obstore), and S3 takes so many of them.
    """

    def __init__(self, url: str, expected: int = 0) -> None:
        self._name = url
        store, key = open_bucket(url)
        self._file: Any = obstore(url).open_writer(
            store, key, buffer_size=part_bytes(expected), max_concurrency=_AT_ONCE
        )
        self._errors = errors_of_bucket()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.discard()
            return
        try:
            self._file.close()
        except self._errors as error:
            raise self._failed(error) from None

    def write(self, data: bytes) -> None:
        """Append to the object."""
        try:
            self._file.write(data)
        except self._errors as error:
            raise self._failed(error) from None

    def sync(self) -> None:
        """Do nothing: nothing is there before its end."""

    def discard(self) -> None:
        """Leave the place as it was; the bucket forgets the parts."""
        gone = WriteFailed("discarded")
        try:
            self._file.__exit__(WriteFailed, gone, None)  # with an error it ends, and keeps nothing
        except self._errors:
            return  # the bucket is away: its own rule removes them

    def _failed(self, error: Exception) -> WriteFailed:
        return WriteFailed(f"cannot write {self._name}: {told(error)}; {credentials(self._name)}")
