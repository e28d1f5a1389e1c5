"""Unpacks gzip and zstd while they are read, within bounds of what comes out.

A compressed byte can stand for 32 KB, so the size of a file on disk bounds neither the time nor the
memory that reading it takes.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable
from typing import IO, Any

import zstandard

#: What comes out may be so many bytes, and beyond them so many times what went in. Measured: chats
#: with one system prompt of 2 kB and a question of their own are packed 97 to 127 times by zstd, by
#: `zstd -19` at most 780 times where they differ in a number only; one of 10 kB, up to 2,200 times.
FREE_BYTES, MOST_RATIO = 2**30, 1000
#: So many bytes may go in without as many coming out: frames and members may be empty.
_IDLE_BYTES = 16 * 2**20

_BUFFER = 256 * 1024
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_SKIPPABLE = b"\x2a\x4d\x18"  # pzstd begins with such a frame; its first byte is 0x50 to 0x5f
#: A compressed byte can stand for 32 KB; so little at once keeps the worst case at 16 MB.
_ZSTD_STEP = 512
#: Memory zstd may take for its window; `zstd --ultra -22` would ask for 128 MB.
_ZSTD_WINDOW = 32 * 2**20

#: Called at least every 256 KiB that are read; what it raises ends the reading.
ReadHook = Callable[[], None]


class OverLimit(Exception):
    """More comes out of a file than is read: says the limit and what to do."""


class WatchedStream(io.RawIOBase):
    """An unbuffered stream whose every read is watched; `count` is how many bytes were read."""

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


class _Packed:
    """The compressed file: counts what goes in."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.count = self.decompressed = 0

    def read(self, size: int = -1) -> bytes:
        piece = self._file.read(size)
        self.count += len(piece)
        if self.count > _IDLE_BYTES + self.decompressed * 2:
            raise OverLimit(
                f"{self.count} compressed bytes stand for only {self.decompressed} bytes of lines; "
                "compress the lines anew, as one stream"
            )
        return piece


class _Unpacked(WatchedStream):
    """What comes out of a compressed file, which is read once. Reading it raises OverLimit where
    that is too many bytes for what went in."""

    def __init__(self, packed: _Packed, source: Any, watch: ReadHook | None) -> None:
        super().__init__(source, watch)
        self._packed = packed

    def seekable(self) -> bool:
        return False

    def readinto(self, buffer: Any) -> int | None:
        count, packed = super().readinto(buffer), self._packed
        packed.decompressed = self.count
        if packed.decompressed > FREE_BYTES + MOST_RATIO * packed.count:
            raise OverLimit(
                f"the file is compressed more than {MOST_RATIO}:1, the most beyond "
                f"{FREE_BYTES} bytes of lines "
                f"({packed.count} bytes stand for {packed.decompressed} or "
                "more); split it, or send its lines uncompressed"
            )
        return count


class _ZstdFile(io.RawIOBase):
    """Decompressed bytes of a .zst stream, of bounded size, that notices a cut-off end."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._context = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
        self._frame: Any = None
        self._rest = b""
        self._out = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._out:
            piece = self._rest or self._source.read(_ZSTD_STEP)
            self._rest = b""
            if not piece:
                if self._frame is not None:
                    raise EOFError("compressed data ends before its end mark")
                return 0
            self._frame = self._frame or self._context.decompressobj()
            self._out = memoryview(self._frame.decompress(piece))
            if self._frame.eof:
                self._rest = self._frame.unused_data
                self._frame = None
        count = min(len(buffer), len(self._out))
        buffer[:count] = self._out[:count]
        self._out = self._out[count:]
        return count


def decompressed(file: io.BufferedReader, watch: ReadHook | None) -> WatchedStream | None:
    """Return what comes out of a file that begins as gzip or zstd; None for any other."""
    head = file.peek(4)[:4]
    packed = _Packed(file)
    if head.startswith(_GZIP):
        source: Any = gzip.GzipFile(fileobj=packed)  # type: ignore[call-overload]
    elif head.startswith(_ZSTD) or (head[1:] == _SKIPPABLE and head[0] & 0xF0 == 0x50):
        source = _ZstdFile(packed)
    else:
        return None
    return _Unpacked(packed, source, watch)


_UTF_32 = "it is UTF-32; convert it to UTF-8, for example with iconv -f UTF-32 -t UTF-8"
_UTF_16 = "it is UTF-16; convert it to UTF-8, for example with iconv -f UTF-16 -t UTF-8"
#: What files of other forms begin with, and what to do about them.
_OTHER_FORMS = (
    (b"BZh", "it is compressed by bzip2; uncompress it (bunzip2), or send gzip or zstd"),
    (b"\xfd7zXZ\0", "it is compressed by xz; uncompress it (unxz), or send gzip or zstd"),
    (b"\xff\xfe\0\0", _UTF_32),
    (b"\0\0\xfe\xff", _UTF_32),
    (b"\xff\xfe", _UTF_16),
    (b"\xfe\xff", _UTF_16),
    (b"PK\3\4", "it is a zip archive or a spreadsheet; unpack it, or save its sheet as CSV"),
    (b"PAR1", "it is a parquet file; give it a name that ends with .parquet"),
    (b"ARROW1", "it is an Arrow file; give it a name that ends with .arrow"),
)


def other_form(head: bytes) -> str:
    """Return what is to be done about a file that has no lines of UTF-8, by how it begins; '' for
    one that may have them."""
    return next((told for begins, told in _OTHER_FORMS if head.startswith(begins)), "")
