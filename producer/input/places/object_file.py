"""An object of a bucket that is written: it appears when it is complete, or not at all.

Its parts go up while it is written. Killed half-way it leaves nothing that anybody sees; the parts
that are left over are removed by the bucket's own rule for unfinished uploads.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from typing import Any, Self

from contract.errors import BatchConflict
from producer.input.files import OutputUnwritable, WriteFailed
from producer.input.places.bucket import (
    credentials,
    errors_of_bucket,
    is_web,
    obstore,
    odd_name,
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
        if odd_name(error):
            return  # of another object, which is nothing to this one: the bucket answers
        raise OutputUnwritable(f"cannot write {url}: {told(error)}; {credentials(url)}") from None


class ObjectFile:
    """Written part by part and completed at the end; a failure leaves the place as it was.

    `expected` says of what may have more than 40 GB how many bytes those are: the parts of an
    upload are all of one size (obstore), and S3 takes so many of them. One with an `owner`, the
    name of a run, must not replace an object that has other content.
    """

    def __init__(self, url: str, expected: int = 0, *, owner: str = "") -> None:
        self._name = url
        self._store, self._key = open_bucket(url)
        self._expected, self._owner = expected, owner
        self._errors = errors_of_bucket()
        self._held, self._size, self._digest = bytearray(), 0, hashlib.sha256()
        self._file: Any = None if owner else self._opened()
        #: Of one with an owner that is complete: what ObjectPlace.fingerprint says of it.
        self.fingerprint = ""

    def _opened(self) -> Any:
        return obstore(self._name).open_writer(
            self._store,
            self._key,
            buffer_size=part_bytes(self._expected),
            max_concurrency=_AT_ONCE,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.discard()
            return
        try:
            if not self._owner:
                self._file.close()
            elif self._file is None:
                self._create()
            else:
                self._complete()
        except BatchConflict:
            self.discard()
            raise
        except self._errors as error:
            raise self._failed(error) from None

    def write(self, data: bytes) -> None:
        """Append to the object."""
        try:
            self._size += len(data)
            self._digest.update(data)
            if self._file is None:
                self._held += data
                if len(self._held) <= _PART:
                    return
                self._file, data, self._held = self._opened(), bytes(self._held), bytearray()
            self._file.write(data)
        except self._errors as error:
            raise self._failed(error) from None

    def _create(self) -> None:
        """Write what one request takes under the condition that nothing is there, which the bucket
        decides. There may be what the same delivery wrote, killed before it said so.

        Raises:
            BatchConflict: there is another object.
        """
        obs, exists = obstore(self._name), obstore(self._name, "exceptions").AlreadyExistsError
        content = bytes(self._held)
        try:
            made = obs.put(self._store, self._key, content, mode="create", use_multipart=False)
        except exists:
            made = self._own()
        self.fingerprint = f"{self._size}-{made['e_tag']}"

    def _complete(self) -> None:
        """Complete an upload in parts. Buckets do that without a condition, so whoever does it has
        made an object beside it first, which only one can; who was killed finds its own name there.

        Raises:
            BatchConflict: there is another object, or somebody else is writing it.
        """
        obs, claim = obstore(self._name), f"{self._key}.writing"
        exists = obstore(self._name, "exceptions").AlreadyExistsError
        name = self._owner.encode()
        try:
            obs.put(self._store, claim, name, mode="create", use_multipart=False)
        except exists:
            if bytes(obs.get(self._store, claim).bytes()) != name:
                raise BatchConflict(
                    f"another run is writing {self._name}: there is {self._name}.writing; wait for "
                    "it, or remove that object if it was killed; then the same command goes on"
                ) from None
        try:
            with suppress(FileNotFoundError):
                self._own()
            self._file.close()
            self.fingerprint = f"{self._size}-{obs.head(self._store, self._key)['e_tag']}"
        finally:
            with suppress(*self._errors):  # without the right to delete it stays, and says whose
                obs.delete(self._store, claim)

    def _own(self) -> Any:
        """Return the metadata of what is there if it has this content.

        Raises:
            BatchConflict: it has another one.
        """
        obs = obstore(self._name)
        found, digest = obs.get(self._store, self._key), hashlib.sha256()
        if found.meta["size"] == self._size:
            for piece in found.stream():
                digest.update(piece)
        if digest.digest() != self._digest.digest():
            raise BatchConflict(
                f"{self._name} was written by somebody else meanwhile, and is left as it is; move "
                "it away, and the same command brings its results there"
            )
        return found.meta

    def sync(self) -> None:
        """Do nothing: nothing is there before its end."""

    def discard(self) -> None:
        """Leave the place as it was; the bucket forgets the parts."""
        if self._file is None:
            return
        gone = WriteFailed("discarded")
        try:
            self._file.__exit__(WriteFailed, gone, None)  # with an error it ends, and keeps nothing
        except self._errors:
            return  # the bucket is away: its own rule removes them

    def _failed(self, error: Exception) -> WriteFailed:
        return WriteFailed(f"cannot write {self._name}: {told(error)}; {credentials(self._name)}")
