"""Reads lines in chunks with fixed boundaries and a rolling digest, in constant memory.

Boundaries depend only on the content: the same file always gives the same chunks. A rolling digest
covers the file from its start to the end of each chunk.
"""

from __future__ import annotations

import hashlib
import io
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
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
)
from producer.input.formats import BOM, binary_format, other_json, other_text

#: Requests after which a chunk ends. Redis serves no other client while the script ENQUEUE handles
#: a chunk (docs/explanation/architecture.md has the times).
CHUNK_LINES = 500
#: Bytes after which a chunk ends, if it has fewer than CHUNK_LINES requests.
CHUNK_BYTES = 2**20
#: Bytes at the end of a file that its fingerprint covers; reading a whole file twice takes long.
_TAIL_BYTES = 2**20
#: Bytes of a read buffer.
_BUFFER = 256 * 1024
#: Most blank lines in a file, and how many more each request allows.
MOST_BLANKS, BLANKS_A_REQUEST = 100_000, 10
#: Most bytes of blank lines in a file; each request allows its own size in addition.
MOST_BLANK_BYTES = 64 * 2**20
#: Most bytes of a line; a file with a longer line is refused.
LONGEST_LINE = 2**30

#: Function that takes a bad line's number, bytes and error, and returns the error for the user.
ExplainError = Callable[[int, bytes, RequestRejected], RequestRejected]


#: Errors of reading a stream.
DAMAGED = (OSError, EOFError, zlib.error, zstandard.ZstdError, OverLimit)


class InputUnreadable(WarmqError):
    """The input cannot be read to its end; the user must fix it."""

    code = "input_unreadable"


class NotJsonLines(InputUnreadable):
    """The input does not have one JSON value on each line."""


def _damaged(line: int, error: Exception) -> InputUnreadable:
    """Return the error of a stream that broke after a line."""
    text = str(error)
    if isinstance(error, EOFError):
        text = "the file is cut off, its compressed data ends too early"
    return InputUnreadable(f"after line {line}: {text}")


@dataclass(slots=True)
class RawChunk:
    """Consecutive lines of a file, unparsed.

    `ordinal` is the number of the chunk from 0, `first` its first line. `lines` are (line number
    from 1, bytes); blank lines have a number too. `too_long` maps the number of each line that was
    skipped for its size to that size. `cursor` is the last line read, `digest` covers the file up
    to it, `size` is the bytes of `lines`. `explain` rewrites the errors of its bad lines.
    """

    ordinal: int
    first: int
    cursor: int = 0
    digest: str = ""
    size: int = 0
    lines: list[tuple[int, bytes]] = field(default_factory=list)
    too_long: dict[int, int] = field(default_factory=dict)
    explain: ExplainError | None = None


class Place(Protocol):
    """A file of this machine, or an object in a bucket. All calls raise InputUnreadable."""

    @property
    def name(self) -> str: ...

    def reopen(self) -> Place:
        """Return the place as it is now."""

    def open(self, *, in_order: bool) -> Any:
        """Return an unbuffered, seekable binary stream; `in_order` if it is read from the start."""

    def size(self) -> int: ...

    def fingerprint(self) -> str:
        """Return a text that changes with the content."""


class FilePlace:
    """A file of this machine."""

    def __init__(self, name: str | Path) -> None:
        self.name = str(name)

    def reopen(self) -> FilePlace:
        """Return itself: it keeps no state."""
        return self

    def open(self, *, in_order: bool) -> Any:
        try:
            return Path(self.name).open("rb", buffering=0)
        except OSError as error:
            raise _unreadable(self.name, error) from None

    def size(self) -> int:
        try:
            return Path(self.name).stat().st_size
        except OSError as error:
            raise _unreadable(self.name, error) from None

    def fingerprint(self) -> str:
        """Return the size, and the digest of the file's last bytes."""
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
    """A source over the lines of a file, an object, or an open unbuffered stream.

    `stream` stays open. `watch` is called during reading, and its error ends the reading. `name` is
    the name in errors.
    """

    #: Only for tables: the columns that are not used, and the columns for the output.
    unused: Sequence[str] = ()
    output_columns = ""

    def __init__(
        self,
        place: str | Place,
        stream: Any = None,
        *,
        watch: ReadHook | None = None,
        name: str = "",
    ) -> None:
        self._place = FilePlace(place) if isinstance(place, str) else place
        self.name = name or self._place.name
        self._owned = stream is None
        self._watch = watch
        self._counted: WatchedStream | None = None
        raw = self._place.open(in_order=True) if stream is None else stream
        if watch is not None:
            raw = self._counted = WatchedStream(raw, watch)
        self._file = io.BufferedReader(raw, _BUFFER)
        self._lines, self._checked = self._file, False
        #: Size in bytes; None if unknown, for example for a pipe.
        self.size = self._place.size() if self._owned and raw.seekable() else None
        #: Whether `reopen` can read the lines again; a pipe is read once.
        self.repeatable = self.size is not None

    @property
    def position(self) -> int:
        """Bytes read so far, of `size`; 0 for a pipe."""
        return self._file.tell() if self.repeatable else 0

    @property
    def decompressed(self) -> int:
        """Bytes read so far, after decompression; 0 for an uncompressed file without `watch`."""
        return self._counted.count if self._counted is not None else 0

    def reopen(self) -> Input:
        """Return the source from its start."""
        return Input(self._place.reopen())

    def chunks(self, seed: str | None, max_line_bytes: int) -> Iterator[RawChunk]:
        """Yield the chunks of the lines (see the function `chunks`)."""
        self._refuse(other_json(self.name, _peek(self.lines())))
        return chunks(self.lines(), seed, max_line_bytes)

    def check(self) -> None:
        """Raise InputUnreadable if the first bytes show that the file has no JSON lines."""
        head = _peek(self.lines())
        self._refuse(other_json(self.name, head) or other_text(head))

    def _refuse(self, remedy: str) -> None:
        if remedy:
            raise NotJsonLines(f"{self.name}: {remedy}")

    def fingerprint(self) -> str:
        """Return the fingerprint of the object, or of the file that was opened; '' for a pipe."""
        if self.size is None:
            return ""
        if isinstance(self._place, FilePlace):
            return _fingerprint(self.name, self._file, self.size)
        return self._place.fingerprint()

    def lines(self) -> io.BufferedReader:
        """Return the decompressed stream; raise InputUnreadable if it is no text in UTF-8."""
        if self._checked:
            return self._lines
        try:
            source = decompressed(self._file, self._watch)
        except OSError as error:
            raise _unreadable(self.name, error) from None
        if source is not None:
            self._counted = source
            self._lines = io.BufferedReader(source, _BUFFER)
        if remedy := binary_format(self.name, _peek(self._lines)):
            raise InputUnreadable(f"{self.name}: {remedy}")
        self._checked = True
        return self._lines

    def close(self) -> None:
        """Close the file; a stream of the caller stays open."""
        if self._owned:
            self._lines.close()
            self._file.close()


def _peek(stream: io.BufferedReader) -> bytes:
    """Return the next bytes of a stream, which are not consumed; b'' if they are damaged.

    In that case reading the lines raises the error, to which a submit adds how to go on.
    """
    try:
        return stream.peek(_BUFFER)
    except DAMAGED:
        return b""


class LineStream:
    """Gives an iterator of lines the `readline` of a stream."""

    def __init__(self, lines: Iterator[bytes]) -> None:
        self._lines = lines
        self._line, self._at = b"", 0

    def readline(self, limit: int, /) -> bytes:
        """Return the next line, or `limit` bytes of it; b'' at the end."""
        if self._at >= len(self._line):
            self._line, self._at = next(self._lines, b""), 0
        start, self._at = self._at, self._at + limit
        return self._line[start : self._at]  # Python does not copy a whole line


Lines = io.BufferedIOBase | LineStream


def longer_than(limit: int, size: int) -> str:
    """Return the problem of a line of more than `limit` bytes, with its remedy."""
    return f"longer than {limit} bytes (it has {size}); shorten it, or raise WARMQ_MAX_LINE_BYTES"


def chunks(
    stream: Lines, seed: str | None, max_line_bytes: int, explain: ExplainError | None = None
) -> Iterator[RawChunk]:
    """Yield the chunks of a stream of lines.

    `seed` (hex) is the digest before the first chunk; None for no digests. A line of more than
    `max_line_bytes` is skipped, and not kept in memory.

    Raises:
        InputUnreadable: compressed data is damaged, or there are too many blank lines; the error
            names the line.
    """
    digest, number, ordinal = seed, 0, 0
    blanks = _BlankLines()
    while True:
        chunk = RawChunk(ordinal, number + 1, explain=explain)
        number = _fill(stream, chunk, digest, max_line_bytes, blanks)
        if not chunk.lines:
            return  # only blank lines were left
        digest = None if seed is None else chunk.digest
        yield chunk
        ordinal += 1


class _BlankLines:
    """Counts a file's blank lines; raises OverLimit for too many."""

    def __init__(self) -> None:
        self._lines = self._bytes = 0
        self._most_lines, self._most_bytes = MOST_BLANKS, MOST_BLANK_BYTES

    def allow_for(self, chunk: RawChunk) -> None:
        """Raise the limits for the requests of a chunk."""
        self._most_lines += BLANKS_A_REQUEST * len(chunk.lines)
        self._most_bytes += chunk.size

    def add(self, size: int) -> None:
        self._lines += 1
        self._bytes += size
        if self._lines > self._most_lines or self._bytes > self._most_bytes:
            raise OverLimit(
                f"{self._lines} blank lines of {self._bytes} bytes so far, more than "
                f"{MOST_BLANKS} lines or {MOST_BLANK_BYTES} bytes beyond what the requests allow; "
                "take them out"
            )


def _fill(
    stream: Lines, chunk: RawChunk, digest: str | None, max_line_bytes: int, blanks: _BlankLines
) -> int:
    """Read one chunk; return the number of the last line read."""
    number, size = chunk.first - 1, 0
    limit = max_line_bytes + 2  # the line end does not count
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
                chunk.too_long[number] = _skip(stream, raw, running)
                lines.append((number, b""))
                continue
            if number == 1 and raw.startswith(BOM):
                raw = raw[len(BOM) :]
            if raw and not raw.isspace():
                lines.append((number, raw))
                size += len(raw)
            else:
                blanks.add(len(raw))
        except DAMAGED as error:
            raise _damaged(number, error) from None
    chunk.cursor, chunk.size = number, size
    chunk.digest = "" if running is None else running.hexdigest()
    blanks.allow_for(chunk)
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
                f"this line is longer than {LONGEST_LINE} bytes, the limit of a line; "
                "write one JSON object on each line"
            )
    return length - piece.endswith(b"\n")
