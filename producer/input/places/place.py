"""A place that is read: a file here, or an object in a bucket."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Protocol

from producer.input.reader import Input, InputUnreadable

#: Bytes at the end of a file that its fingerprint covers.
_TAIL_BYTES = 2**20


class NotThere(InputUnreadable):
    """Nothing of that name is there: its bucket says so."""


class Place(Protocol):
    """What can be opened again and again."""

    @property
    def name(self) -> str:
        """What messages call it."""

    def anew(self) -> Place:
        """Return the same, as it is now."""

    def open(self, *, in_order: bool) -> Any:
        """Return an unbuffered binary stream that can be sought in; `in_order`, from its start to
        its end.

        Raises:
            InputUnreadable: it is not there, or may not be read.
        """

    def size(self) -> int:
        """Return its size in bytes; raises as `open` does."""

    def fingerprint(self) -> str:
        """Return what another content hardly has; raises as `open` does."""


class PlaceInput(Input):
    """The lines of what is at a place, which can be read again.

    Raises:
        InputUnreadable: it is not there, or may not be read.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        super().__init__(place.name, place.open(in_order=True), owned=True)
        self.size = place.size()

    def again(self) -> PlaceInput:
        """Open it anew, from its start."""
        return PlaceInput(self._place.anew())

    def fingerprint(self) -> str:
        """Return the place's."""
        return self._place.fingerprint()


class FilePlace:
    """A file of this machine."""

    def __init__(self, name: str | Path) -> None:
        self.name = str(name)

    def anew(self) -> FilePlace:
        """Return itself: nothing is kept of the file."""
        return self

    def open(self, *, in_order: bool) -> Any:
        """Return the opened file."""
        try:
            return Path(self.name).open("rb", buffering=0)
        except OSError as error:
            raise InputUnreadable(f"cannot read {self.name}: {error.strerror}") from None

    def size(self) -> int:
        """Return its size."""
        with self.open(in_order=False) as file:
            return int(file.seek(0, 2))

    def fingerprint(self) -> str:
        """Return size and digest of the end: all of it may be more than one wants to read twice."""
        try:
            with self.open(in_order=False) as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - _TAIL_BYTES))
                tail = file.read(_TAIL_BYTES)
        except OSError as error:
            raise InputUnreadable(f"cannot read {self.name}: {error.strerror}") from None
        return f"{size}-{hashlib.sha256(tail).hexdigest()}"
