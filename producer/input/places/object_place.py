"""An object of a bucket that is read: in order in large blocks, or here and there."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from producer.input.places.bucket import errors_of_bucket, is_web, obstore, open_bucket, shown, told
from producer.input.places.place import NotThere
from producer.input.reader import InputUnreadable

#: Bytes of one request of what is read in order. None stays open while Redis is full.
_BLOCK = 8 * 2**20


class ObjectPlace:
    """The object at a URL.

    Raises:
        BadPlace, ExtraMissing: as `open_bucket` does.
    """

    def __init__(self, url: str) -> None:
        self.name = shown(url)
        self._url = url
        self._store, self._key = open_bucket(url)

    @cached_property
    def _meta(self) -> dict[str, Any]:
        return self._looked_up()

    def _looked_up(self) -> dict[str, Any]:
        """Ask what there is. A URL that is signed for GET refuses HEAD."""
        found: dict[str, Any]
        try:
            found = self._asked("head")
        except InputUnreadable:
            if not is_web(self.name):
                raise
            found = self._asked("get").meta
        return found

    def anew(self) -> ObjectPlace:
        """Return the same, as it is now."""
        return ObjectPlace(self._url)

    def _asked(self, what: str) -> Any:
        with self._worded():
            return getattr(obstore(self.name), what)(self._store, self._key)

    @contextmanager
    def _worded(self) -> Iterator[None]:
        """Tell what obstore raises as what cannot be read."""
        try:
            yield
        except obstore(self.name, "exceptions").PreconditionError:
            raise InputUnreadable(f"{self.name} has changed while it was read") from None
        except FileNotFoundError:
            raise NotThere(f"cannot read {self.name}: there is no such object") from None
        except errors_of_bucket() as error:
            raise InputUnreadable(f"cannot read {self.name}: {told(error)}") from None

    def size(self) -> int:
        """Return its size in bytes."""
        return int(self._meta["size"])

    def fingerprint(self) -> str:
        """Return size and what the bucket says of its content, or when it was written."""
        now = self._looked_up()
        tag = now.get("e_tag") or now["last_modified"].isoformat()
        return f"{now['size']}-{tag}"

    def open(self, *, in_order: bool) -> Any:
        """Return a stream over it; of a server that knows no ranges, over a copy in a file."""
        if self.size() and not self._has_ranges():
            return self._copy()
        return _ObjectStream(self, _BLOCK if in_order else 0)

    def _has_ranges(self) -> bool:
        not_supported = obstore(self.name, "exceptions").NotSupportedError
        try:
            obstore(self.name).get_range(self._store, self._key, start=0, length=1)
        except not_supported:
            return False
        except errors_of_bucket():
            return True  # what is wrong is told when it is read
        return True

    def _copy(self) -> Any:
        copy = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - who reads it closes it
        try:
            with self._worded():
                for piece in obstore(self.name).get(self._store, self._key).stream():
                    copy.write(piece)
        except InputUnreadable:
            copy.close()
            raise
        copy.seek(0)
        return copy

    def read(self, start: int, end: int) -> bytes:
        """Return some of its bytes, of the object that was there when it was opened.

        Raises:
            InputUnreadable: it is gone or another, or the bucket cannot be reached.
        """
        options: dict[str, Any] = {"range": (start, end)}
        tag = self._meta.get("e_tag")
        if tag and not tag.startswith("W/"):  # a weak one matches nothing, says RFC 9110
            options["if_match"] = tag
        with self._worded():  # a connection may be cut within what it brings
            answer = obstore(self.name).get(self._store, self._key, options=options)
            found = bytes(answer.bytes())
        if len(found) != end - start or _plain(answer.meta.get("e_tag") or tag) != _plain(tag):
            raise InputUnreadable(f"{self.name} has changed while it was read")
        return found


def _plain(tag: str | None) -> str | None:
    return tag and tag.removeprefix("W/")


class _ObjectStream(io.RawIOBase):
    """Reads an object. `block` bytes are fetched at least, which is for what is read in order."""

    def __init__(self, place: ObjectPlace, block: int) -> None:
        self._place, self._block = place, block
        self._size, self._at = place.size(), 0
        self._start, self._held = 0, b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        end = min(self._at + len(buffer), self._size)
        if self._at >= end:
            return 0
        if not self._start <= self._at < self._start + len(self._held):
            until = min(self._size, max(end, self._at + self._block))
            self._start, self._held = self._at, self._place.read(self._at, until)
        begin = self._at - self._start
        found = self._held[begin : begin + end - self._at]
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)
