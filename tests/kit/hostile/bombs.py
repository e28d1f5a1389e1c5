"""Small files that stand for much work: what they hold, and what a gateway says of each.

`bombs` is the list for files of a batch; each is a few kB, at most 100 kB where it has to be, or
2 MB where it is not compressed.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any, Final

import zstandard

MB = 2**20
URL: Final = "/v1/chat/completions"


def line(number: int = 0, **body: Any) -> bytes:
    """Return a good line."""
    asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2} | body
    told = {"custom_id": f"r{number}", "method": "POST", "url": URL, "body": asked}
    return json.dumps(told).encode() + b"\n"


def zstd_of(piece: bytes, times: int, end: bytes = b"") -> bytes:
    """Return a piece so many times, and an end, in one frame of zstd."""
    packing = zstandard.ZstdCompressor(level=3).compressobj()
    packed = [packing.compress(piece) for _ in range(times)]
    return b"".join([*packed, packing.compress(end), packing.flush()])


def gzip_of(piece: bytes, times: int, end: bytes = b"") -> bytes:
    """Return the same by gzip."""
    return gzip.compress(piece * times + end)


def zstd_of_frames(piece: bytes, times: int) -> bytes:
    """Return a piece so many times, each in a frame of its own."""
    return zstandard.ZstdCompressor(level=3).compress(piece) * times


def with_nested(depth: int, opening: str = "[", closing: str = "]") -> bytes:
    """Return a line with a field nested so deep."""
    return line(deep=0).replace(b'"deep": 0', f'"deep":{opening * depth}{closing * depth}'.encode())


def bombs() -> Iterator[tuple[str, bytes, str, str]]:
    """Yield name, content, code and a part of the message of files that refuse their batch."""
    blanks = "blank lines"
    yield "blank lines, zstd", zstd_of(b"\n" * MB, 200), "invalid_file", blanks
    yield "blank lines before the end", zstd_of(b"\n" * MB, 64, line()), "invalid_file", blanks
    yield "blank lines, gzip", gzip_of(b"\n" * MB, 64), "invalid_file", blanks
    yield "blank lines, uncompressed", b"\n" * 2_000_000, "invalid_file", blanks
    yield "lines of CR LF", zstd_of(b"\r\n" * MB, 64), "invalid_file", blanks
    yield "CR and no LF", zstd_of(b"\r" * MB, 200), "invalid_file", blanks
    yield "lines of spaces", zstd_of((b" " * 1023 + b"\n") * 1024, 200), "invalid_file", blanks
    yield "frames of blank lines", zstd_of_frames(b"\n" * MB, 64), "invalid_file", blanks
    yield "members of blank lines", gzip.compress(b"\n" * MB) * 64, "invalid_file", blanks
    yield "one endless line", zstd_of(b"a" * MB, 1200), "invalid_file", "longer than"
    yield "one line of NUL", zstd_of(b"\0" * MB, 1200), "invalid_file", "longer than"
    yield "gzip of gzip", gzip.compress(gzip_of(b"\n" * MB, 64)), "invalid_json_line", "not valid"
    yield "nested 5,000 deep", with_nested(5000), "invalid_json_line", "not valid JSON"
    objects = with_nested(20_000, '{"a":', "}")
    yield "objects 20,000 deep", objects, "invalid_json_line", "not valid JSON"
    yield "deep after good lines", line() + with_nested(5000), "invalid_json_line", "not valid JSON"
    yield "lines of one letter", b"x\n" * MB, "invalid_json_line", "not valid JSON"
    brackets = b"[" * 100_000 + b"\n"
    yield "only brackets", brackets, "invalid_json_line", "not valid JSON"
    number = b'{"custom_id":"a","url":' + b"1" * 100_000 + b"}\n"
    yield "a number of 100,000 digits", number, "invalid_json_line", "not valid JSON"
