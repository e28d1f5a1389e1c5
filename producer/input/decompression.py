"""Decompresses gzip and zstd while reading, and bounds the size of the output.

One compressed byte can stand for 32 KB, so a file's size on disk bounds neither time nor memory.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable
from typing import IO, Any

import zstandard

#: Bytes of output that any file may have, and the most output above them as a multiple of the
#: input. Measured ratios for chats with the same system prompt: 97 to 127 with different questions
#: (a prompt of 2 kB, zstd); up to 780 if only a number differs (2 kB, `zstd -19`); up to 2,200 if
#: only a number differs and the prompt has 10 kB.
FREE_BYTES, MOST_RATIO = 2**30, 1000
#: Bytes of input that a file may have beyond twice its output: frames and members may be empty.
_IDLE_BYTES = 16 * 2**20

#: Bytes of a read buffer.
_BUFFER = 256 * 1024
#: First bytes of gzip and zstd files. Files of pzstd begin with a skippable frame: a byte from 0x50
#: to 0x5f, then _SKIPPABLE.
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_SKIPPABLE = b"\x2a\x4d\x18"
#: Bytes of input decompressed at a time: a byte gives up to 32 KB, so the output is at most 16 MB.
_ZSTD_STEP = 512
#: Most bytes of zstd's window in memory; `zstd --ultra -22` would ask for 128 MB.
_ZSTD_WINDOW = 32 * 2**20

#: Function that is called at least once in 256 KiB of reading; its error ends the reading.
ReadHook = Callable[[], None]


class OverLimit(Exception):
    """A file exceeds a limit of reading; the text has the limit and the remedy."""


class WatchedStream(io.RawIOBase):
    """An unbuffered stream that calls a hook on each read and counts the bytes."""

    def __init__(self, source: Any, watch: ReadHook | None) -> None:
        self._source, self._watch = source, watch
        self.count = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._source.seekable())

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return int(self._source.seek(offset, whence))

    def fileno(self) -> int:
        return int(self._source.fileno())

    def readinto(self, buffer: Any) -> int | None:
        if self._watch is not None:
            self._watch()
        count: int | None = self._source.readinto(buffer)
        self.count += count or 0
        return count

    def close(self) -> None:
        if not self.closed:
            self._source.close()
        super().close()


class _CompressedFile:
    """Reads a compressed file; raises OverLimit if it has too little output."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        #: Bytes of input and of output so far.
        self.count = self.output = 0

    def read(self, size: int = -1) -> bytes:
        piece = self._file.read(size)
        self.count += len(piece)
        if self.count > _IDLE_BYTES + self.output * 2:
            raise OverLimit(
                f"{self.count} compressed bytes stand for only {self.output} bytes of lines; "
                "compress the lines again, as one stream"
            )
        return piece


class _DecompressedStream(WatchedStream):
    """The decompressed output, readable once; raises OverLimit if it is too large."""

    def __init__(self, packed: _CompressedFile, source: Any, watch: ReadHook | None) -> None:
        super().__init__(source, watch)
        self._packed = packed

    def seekable(self) -> bool:
        return False

    def readinto(self, buffer: Any) -> int | None:
        count = super().readinto(buffer)
        self._packed.output = self.count
        if self.count > FREE_BYTES + MOST_RATIO * self._packed.count:
            raise OverLimit(
                f"the file is compressed more than {MOST_RATIO}:1, the most beyond {FREE_BYTES} "
                f"bytes of lines ({self._packed.count} bytes stand for {self.count} or more); "
                "split it, or send its lines uncompressed"
            )
        return count


class _ZstdFile(io.RawIOBase):
    """Decompresses zstd in bounded steps; raises EOFError if the input is cut off."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._context = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
        self._frame: Any = None
        self._rest = b""
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            piece = self._rest or self._source.read(_ZSTD_STEP)
            self._rest = b""
            if not piece:
                if self._frame is not None:
                    raise EOFError("compressed data ends before its end mark")
                return 0
            self._frame = self._frame or self._context.decompressobj()
            self._output = memoryview(self._frame.decompress(piece))
            if self._frame.eof:
                self._rest = self._frame.unused_data
                self._frame = None
        count = min(len(buffer), len(self._output))
        buffer[:count] = self._output[:count]
        self._output = self._output[count:]
        return count


def decompressed(file: io.BufferedReader, watch: ReadHook | None) -> WatchedStream | None:
    """Return the output of a gzip or zstd file; None for any other file."""
    head = file.peek(4)[:4]
    packed = _CompressedFile(file)
    if head.startswith(_GZIP):
        source: Any = gzip.GzipFile(fileobj=packed)  # type: ignore[call-overload]
    elif head.startswith(_ZSTD) or (head[1:] == _SKIPPABLE and head[0] & 0xF0 == 0x50):
        source = _ZstdFile(packed)
    else:
        return None
    return _DecompressedStream(packed, source, watch)
