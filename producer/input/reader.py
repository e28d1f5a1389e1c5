"""Reads the input file: physical lines in chunks with fixed boundaries and a rolling digest.

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
from producer.input.unpacking import OverLimit, Unpacked, Watch, WatchedFile, other_form, unpacked

#: A chunk ends after this many requests or, if that comes first, this many bytes: Redis
#: serves nobody while ENQUEUE takes them in (docs/architecture.md says how long).
CHUNK_LINES = 500
CHUNK_BYTES = 2**20

#: Bytes at the end of a file that its fingerprint covers.
_TAIL_BYTES = 2**20

_BOM = b"\xef\xbb\xbf"
_BUFFER = 256 * 1024
#: Blank lines of a file: so many, and so many more for each request; their bytes likewise.
MOST_BLANKS, BLANKS_A_REQUEST = 100_000, 10
MOST_BLANK_BYTES = 64 * 2**20
#: A longer line is not read to its end: the file is refused.
LONGEST_LINE = 2**30


#: Number, bytes and error of a line -> its error in the words of what it was made from.
Told = Callable[[int, bytes, RequestRejected], RequestRejected]


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
    told: Told | None = None


class Lines(Protocol):
    """What lines are read from."""

    def readline(self, limit: int, /) -> bytes:
        """Return the next line, or as much of it as `limit`; b'' at the end."""


class Input:
    """The file to submit, or an open unbuffered stream, which stays open unless it is `owned`.
    Opening it reads nothing yet. `watch` is called while it is read, and may raise to end that."""

    def __init__(
        self, name: str, stream: Any = None, *, owned: bool = False, watch: Watch | None = None
    ) -> None:
        self.name = name
        self._owned = owned or stream is None
        self._watch = watch
        self._counted: WatchedFile | Unpacked | None = None
        try:
            raw = stream or Path(name).open("rb", buffering=0)  # noqa: SIM115 - close() does
            if watch is not None:
                raw = self._counted = WatchedFile(raw, watch)
            self._file = io.BufferedReader(raw, _BUFFER)
            self._lines = self._file
            #: Size on disk in bytes, None where it is not known in advance.
            known = stream is None and raw.seekable()
            self.size = Path(name).stat().st_size if known else None
            if stream is None and Path(name).is_dir():
                raise IsADirectoryError(0, "it is a directory")
        except OSError as error:
            raise InputUnreadable(f"cannot read {name}: {error.strerror}") from None

    @property
    def position(self) -> int:
        """How many bytes of `size` were read."""
        return self._file.tell() if self.size is not None else 0

    @property
    def unpacked(self) -> int:
        """How many bytes of lines were read, as they are uncompressed; counted if it is watched."""
        return self._counted.count if self._counted is not None else 0

    @property
    def repeatable(self) -> bool:
        """Whether it can be read again: not what came through a pipe."""
        return self.size is not None

    def again(self) -> Input:
        """Open the file anew, from its start."""
        return Input(self.name)

    def chunks(self, seed: str | None, max_line_bytes: int) -> Iterator[RawChunk]:
        """Yield its lines, as the function of that name does."""
        return chunks(self.lines(), seed, max_line_bytes)

    def fingerprint(self) -> str:
        """Return what another file hardly has: size and digest of the end; '' for a pipe.

        Of the end only, for a file may be larger than one wants to read twice.

        Raises:
            InputUnreadable: the file cannot be read.
        """
        if self.size is None:
            return ""
        try:
            tail = os.pread(self._file.fileno(), _TAIL_BYTES, max(0, self.size - _TAIL_BYTES))
        except OSError as error:
            raise InputUnreadable(f"cannot read {self.name}: {error.strerror}") from None
        return f"{self.size}-{hashlib.sha256(tail).hexdigest()}"

    def lines(self) -> io.BufferedReader:
        """Return the decompressed stream.

        Raises:
            InputUnreadable: not even its first bytes can be read.
        """
        try:
            source = unpacked(self._file, self._watch)
            if source is None and (other := other_form(self._file.peek(8)[:8])):
                raise InputUnreadable(f"{self.name}: {other}")
        except OSError as error:
            raise InputUnreadable(f"cannot read {self.name}: {error.strerror}") from None
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
    stream: Lines, seed: str | None, max_line_bytes: int, told: Told | None = None
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
        chunk = RawChunk(ordinal, number + 1, told=told)
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
                if number == 1 and chunk.told is None and raw.lstrip()[:1] == b"[":
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
