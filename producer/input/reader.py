"""Reads what is at a place: physical lines in chunks with fixed boundaries and a rolling digest.

Nothing here grows with the file. Boundaries depend on the content alone, so
that the same file gives the same chunks whoever reads it, and when.
"""

from __future__ import annotations

import hashlib
import io
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import zstandard

from contract.errors import RequestRejected, WarmqError
from producer.input.decompression import (
    OverLimit,
    ReadHook,
    WatchedStream,
    decompressed,
    other_form,
)

#: A chunk ends after this many requests or, if that comes first, this many bytes: Redis
#: serves nobody while ENQUEUE takes them in (docs/explanation/architecture.md says how long).
CHUNK_LINES = 500
CHUNK_BYTES = 2**20

#: Bytes at the end of a file that its fingerprint covers: all of it may be more than one wants to
#: read twice.
_TAIL_BYTES = 2**20
_BOM = b"\xef\xbb\xbf"
_BUFFER = 256 * 1024
#: Blank lines of a file: so many, and so many more for each request; their bytes likewise.
MOST_BLANKS, BLANKS_A_REQUEST = 100_000, 10
MOST_BLANK_BYTES = 64 * 2**20
#: A longer line is not read to its end: the file is refused.
LONGEST_LINE = 2**30


#: Number, bytes and error of a line -> its error in the words of what it was made from.
ExplainError = Callable[[int, bytes, RequestRejected], RequestRejected]


class InputUnreadable(WarmqError):
    """The input cannot be read to its end: its owner must mend it."""

    code = "input_unreadable"


@dataclass(slots=True)
class RawChunk:
    """Consecutive requests as they stand in the file.

    `lines` are (physical line number from 1, bytes); `too_long` maps the numbers
    of lines that were skipped for their size to that size in bytes. `cursor` is
    the last physical line read, `digest` covers all bytes of the file up to it,
    `size` is that of the lines in bytes. `told` gets the number, the bytes and the
    error of a bad line, and returns the error in the source's own terms.
    """

    ordinal: int
    first: int
    cursor: int = 0
    digest: str = ""
    size: int = 0
    lines: list[tuple[int, bytes]] = field(default_factory=list)
    too_long: dict[int, int] = field(default_factory=dict)
    explain: ExplainError | None = None


class Lines(Protocol):
    """What lines are read from."""

    def readline(self, limit: int, /) -> bytes:
        """Return the next line, or as much of it as `limit`; b'' at the end."""


class Place(Protocol):
    """What can be opened again and again: a file here, or an object in a bucket."""

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
            raise _unreadable(self.name, error) from None

    def size(self) -> int:
        """Return its size."""
        try:
            return Path(self.name).stat().st_size
        except OSError as error:
            raise _unreadable(self.name, error) from None

    def fingerprint(self) -> str:
        """Return size and digest of the end."""
        with self.open(in_order=False) as file:
            return _fingerprint(self.name, file, self.size())


def _unreadable(name: str, error: OSError) -> InputUnreadable:
    return InputUnreadable(f"cannot read {name}: {error.strerror}")


def _fingerprint(name: str, file: Any, size: int) -> str:
    try:
        tail = os.pread(file.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES))
    except OSError as error:
        raise _unreadable(name, error) from None
    return f"{size}-{hashlib.sha256(tail).hexdigest()}"


class Input:
    """The lines of a file or another place, or of an open unbuffered stream, which stays open.
    Opening it reads nothing yet. `watch` is called while it is read, and may raise to end that.

    Raises:
        InputUnreadable: it is not there, or may not be read.
    """

    def __init__(
        self, place: str | Place, stream: Any = None, *, watch: ReadHook | None = None
    ) -> None:
        self._place = FilePlace(place) if isinstance(place, str) else place
        self.name = self._place.name
        self._owned = stream is None
        self._watch = watch
        self._counted: WatchedStream | None = None
        raw = self._place.open(in_order=True) if stream is None else stream
        if watch is not None:
            raw = self._counted = WatchedStream(raw, watch)
        self._file = io.BufferedReader(raw, _BUFFER)
        self._lines = self._file
        #: Size in bytes, None where it is not known in advance.
        self.size = self._place.size() if self._owned and raw.seekable() else None

    @property
    def position(self) -> int:
        """How many bytes of `size` were read."""
        return self._file.tell() if self.size is not None else 0

    @property
    def decompressed(self) -> int:
        """How many bytes of lines were read, as they are uncompressed; counted if it is watched."""
        return self._counted.count if self._counted is not None else 0

    @property
    def repeatable(self) -> bool:
        """Whether it can be read again: not what came through a pipe."""
        return self.size is not None

    def again(self) -> Input:
        """Open it anew, from its start."""
        return Input(self._place.anew())

    def chunks(self, seed: str | None, max_line_bytes: int) -> Iterator[RawChunk]:
        """Yield its lines, as the function of that name does."""
        return chunks(self.lines(), seed, max_line_bytes)

    def fingerprint(self) -> str:
        """Return that of its place, of a file as it was when it was opened; '' for a pipe.

        Raises:
            InputUnreadable: it cannot be read.
        """
        if self.size is None:
            return ""
        if isinstance(self._place, FilePlace):
            return _fingerprint(self.name, self._file, self.size)
        return self._place.fingerprint()

    def lines(self) -> io.BufferedReader:
        """Return the decompressed stream.

        Raises:
            InputUnreadable: not even its first bytes can be read.
        """
        try:
            source = decompressed(self._file, self._watch)
            if source is None and (other := other_form(self._file.peek(8)[:8])):
                raise InputUnreadable(f"{self.name}: {other}")
        except OSError as error:
            raise _unreadable(self.name, error) from None
        if source is not None:
            self._counted = source
            self._lines = io.BufferedReader(source, _BUFFER)
        return self._lines

    def close(self) -> None:
        """Close the file; a stream that is not owned stays open."""
        if self._owned:
            self._lines.close()
            self._file.close()


def chunks(
    stream: Lines, seed: str | None, max_line_bytes: int, explain: ExplainError | None = None
) -> Iterator[RawChunk]:
    """Yield the chunks of a stream of lines.

    `seed` is the digest (hex) of everything else that shapes the messages. A line of more than
    `max_line_bytes` is skipped without being held in memory. Without a seed there are no digests.

    Raises:
        InputUnreadable: for damaged compressed data, or more bytes that are no request than a file
            may have; it names the line.
    """
    digest, number, ordinal = seed, 0, 0
    blanks = _Blanks()
    while True:
        chunk = RawChunk(ordinal, number + 1, explain=explain)
        number = _fill(stream, chunk, digest, max_line_bytes, blanks)
        if not chunk.lines:
            return  # blank lines at the end do not count
        digest = None if seed is None else chunk.digest
        yield chunk
        ordinal += 1


class _Blanks:
    """Counts the blank lines of a file, and what may be had of them."""

    def __init__(self) -> None:
        self._lines = self._bytes = 0
        self._most_lines, self._most_bytes = MOST_BLANKS, MOST_BLANK_BYTES

    def allow(self, chunk: RawChunk) -> None:
        """Note the requests of a chunk, for each of which there may be more blank lines."""
        self._most_lines += BLANKS_A_REQUEST * len(chunk.lines)
        self._most_bytes += chunk.size

    def add(self, size: int) -> None:
        """Count a blank line.

        Raises:
            OverLimit: the file has too many.
        """
        self._lines += 1
        self._bytes += size
        if self._lines > self._most_lines or self._bytes > self._most_bytes:
            raise OverLimit(
                f"{self._lines} blank lines of {self._bytes} bytes so far, more than "
                f"{MOST_BLANKS} lines or {MOST_BLANK_BYTES} bytes beyond those between requests; "
                "take them out"
            )


def _fill(
    stream: Lines, chunk: RawChunk, digest: str | None, max_line_bytes: int, blanks: _Blanks
) -> int:
    """Read one chunk; return the number of the last line read."""
    number, size = chunk.first - 1, 0
    limit = max_line_bytes + 2  # room for the line end, which does not count
    running = None if digest is None else hashlib.sha256(bytes.fromhex(digest))
    lines = chunk.lines
    while len(lines) < CHUNK_LINES and size < CHUNK_BYTES:
        try:
            raw = stream.readline(limit)
            if not raw:
                break
            number += 1
            if running is not None:
                running.update(raw)
            if len(raw) > max_line_bytes and len(raw.rstrip(b"\r\n")) > max_line_bytes:
                if number == 1 and chunk.explain is None and raw.lstrip()[:1] == b"[":
                    raise InputUnreadable(
                        "line 1: it is one JSON list; write each of its objects on a line of its "
                        "own, for example with jq -c '.[]'"
                    )
                chunk.too_long[number] = _skip(stream, raw, running)
                lines.append((number, b""))
                continue
            if number == 1 and raw.startswith(_BOM):
                raw = raw[len(_BOM) :]
            if raw and not raw.isspace():
                lines.append((number, raw))
                size += len(raw)
            else:
                blanks.add(len(raw))
        except EOFError:
            raise InputUnreadable(
                f"after line {number}: the file is cut off, its compressed data ends too early"
            ) from None
        except (OSError, zlib.error, zstandard.ZstdError, OverLimit) as error:
            raise InputUnreadable(f"after line {number}: {error}") from None
    chunk.cursor, chunk.size = number, size
    chunk.digest = "" if running is None else running.hexdigest()
    blanks.allow(chunk)
    return number


def _skip(stream: Lines, start: bytes, running: hashlib._Hash | None) -> int:
    """Read the rest of an over-long line into the digest only; return the line's size."""
    length, piece = len(start), start
    while piece and not piece.endswith(b"\n"):
        piece = stream.readline(_BUFFER)
        if running is not None:
            running.update(piece)
        length += len(piece)
        if length > LONGEST_LINE:
            raise OverLimit(
                f"this line is longer than {LONGEST_LINE} bytes, the most that is read of one; "
                "write one JSON object on each line"
            )
    return length - piece.endswith(b"\n")
