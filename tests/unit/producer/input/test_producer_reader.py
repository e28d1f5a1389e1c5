"""Reading input files: chunks, digests, compression, sizes."""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard
from hypothesis import assume, given
from hypothesis import strategies as st

from producer.input.reader import CHUNK_BYTES, CHUNK_LINES, Input, InputUnreadable, RawChunk, chunks

SEED = "00" * 32


def read(data: bytes, limit: int = 1000, seed: str = SEED) -> list[RawChunk]:
    return list(chunks(io.BufferedReader(io.BytesIO(data)), seed, limit))


def lines_of(data: bytes, limit: int = 1000) -> list[tuple[int, bytes]]:
    return [(n, line.rstrip(b"\r\n")) for chunk in read(data, limit) for n, line in chunk.lines]


def read_file(path: Path) -> list[tuple[int, bytes]]:
    source = Input(str(path))
    try:
        return [line for chunk in chunks(source.lines(), SEED, 1000) for line in chunk.lines]
    finally:
        source.close()


def test_blank_lines_are_ignored_and_counted():
    assert lines_of(b"\n  \n{1}\n\r\n{2}") == [(3, b"{1}"), (5, b"{2}")]


def test_a_byte_order_mark_is_no_part_of_the_first_line():
    assert lines_of(b"\xef\xbb\xbf{1}\n{2}\n") == [(1, b"{1}"), (2, b"{2}")]


def test_a_file_of_nothing_but_a_byte_order_mark_has_no_lines():
    assert read(b"\xef\xbb\xbf") == []


def test_a_chunk_ends_after_a_fixed_number_of_lines():
    found = read(b"{}\n" * (2 * CHUNK_LINES + 1))
    assert [(c.ordinal, c.first, c.cursor, len(c.lines)) for c in found] == [
        (0, 1, CHUNK_LINES, CHUNK_LINES),
        (1, CHUNK_LINES + 1, 2 * CHUNK_LINES, CHUNK_LINES),
        (2, 2 * CHUNK_LINES + 1, 2 * CHUNK_LINES + 1, 1),
    ]


def test_a_chunk_ends_after_a_fixed_number_of_bytes():
    line = b"x" * (CHUNK_BYTES // 4) + b"\n"
    assert [len(c.lines) for c in read(line * 6, limit=CHUNK_BYTES)] == [4, 2]


def test_equal_files_have_equal_digests_and_a_changed_byte_changes_all_that_follow():
    same, changed = b"{}\n" * 1500, b"{}\n" * 600 + b"[]\n" + b"{}\n" * 899
    first, second = read(same), read(changed)
    assert [c.digest for c in read(same)] == [c.digest for c in first]
    assert first[0].digest == second[0].digest
    assert first[1].digest != second[1].digest
    assert first[2].digest != second[2].digest


def test_the_digest_covers_the_options_seed():
    assert read(b"{}\n", seed="11" * 32)[0].digest != read(b"{}\n")[0].digest


def test_a_blank_line_changes_the_digest_because_it_moves_line_numbers():
    assert read(b"\n{}\n")[0].digest != read(b"{}\n")[0].digest


def test_a_line_of_exactly_the_limit_is_read():
    assert lines_of(b"x" * 100 + b"\r\n" + b"y", limit=100) == [(1, b"x" * 100), (2, b"y")]


@pytest.mark.parametrize("size", [101, 102, 103, 50_000_000])
@pytest.mark.parametrize("end", [b"\n{}\n", b"\r\n{}\n", b""])
def test_a_longer_line_is_skipped_and_the_next_one_read(size: int, end: bytes):
    chunk = read(b"x" * size + end, limit=100)[0]
    assert chunk.lines[0] == (1, b"")
    assert chunk.too_long[1] in (size, size + 1)  # a \r may count
    assert chunk.lines[1:] == ([(2, b"{}\n")] if end else [])


def test_a_skipped_line_is_part_of_the_digest():
    a, b = b"x" * 5000 + b"1\n", b"x" * 5000 + b"2\n"
    assert read(a, limit=100)[0].digest != read(b, limit=100)[0].digest


@given(st.binary(max_size=300), st.integers(1, 40))
def test_no_line_is_lost_or_split_whatever_the_bytes(data: bytes, limit: int):
    data = data.replace(b"\r", b"\n").removeprefix(b"\xef\xbb\xbf")
    assume(not data.lstrip().startswith(b"["))  # a file that is one JSON list is refused as such
    expected = [
        (n, raw if len(raw) <= limit else b"")
        for n, raw in enumerate(data.split(b"\n"), 1)
        if len(raw) > limit or not (raw == b"" or raw.isspace())
    ]
    assert lines_of(data, limit) == expected


def two_zstd_frames(data: bytes) -> bytes:
    compress = zstandard.ZstdCompressor().compress
    return compress(data[:7]) + compress(data[7:])


def pzstd(data: bytes) -> bytes:
    return b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd" + zstandard.ZstdCompressor().compress(data)


@pytest.mark.parametrize("pack", [bytes, gzip.compress, two_zstd_frames, pzstd])
def test_compression_is_seen_by_content_whatever_the_name(tmp_path: Path, pack):
    data = b"".join(b'{"prompt":"%d"}\n' % i for i in range(5000))
    path = tmp_path / "input.jsonl"
    path.write_bytes(pack(data))
    assert [line for _, line in read_file(path)] == data.splitlines(keepends=True)


@pytest.mark.parametrize("pack", [gzip.compress, two_zstd_frames])
def test_a_cut_off_compressed_file_is_an_error_and_not_a_shorter_file(tmp_path: Path, pack):
    path = tmp_path / "input.gz"
    path.write_bytes(pack(os.urandom(5000).hex().encode())[:-20])
    with pytest.raises(InputUnreadable, match="after line 0"):
        read_file(path)


def test_damaged_compressed_data_says_how_far_it_was_good(tmp_path: Path):
    path = tmp_path / "input.gz"
    path.write_bytes(gzip.compress(b'{"prompt":"x"}\n' * 100_000) + b"no gzip")
    with pytest.raises(InputUnreadable, match=r"after line [1-9]\d{3,4}: "):
        read_file(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(InputUnreadable, match=r"cannot read .*gone\.jsonl: No such file"):
        Input(str(tmp_path / "gone.jsonl"))


def test_a_directory_is_no_input(tmp_path: Path):
    with pytest.raises(InputUnreadable, match=r"cannot read .*: Is a directory"):
        Input(str(tmp_path))


READ_ALL = """
import resource, sys
from producer.input.reader import Input, chunks
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
source = Input(sys.argv[1])
count = sum(len(c.lines) for c in chunks(source.lines(), "00" * 32, 10 * 2**20))
source.close()
print(count, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("pack", ["plain", "gz", "zst"])
def test_memory_does_not_grow_with_file_or_line(tmp_path: Path, pack: str):
    path = tmp_path / "input"
    one = b"x" * 199 + b"\n"
    opened = {
        "plain": lambda: path.open("wb"),
        "gz": lambda: gzip.GzipFile(path, "wb", compresslevel=1),
        "zst": lambda: zstandard.open(path, "wb"),
    }[pack]
    with opened() as file:
        for _ in range(60):
            file.write(one * 5000)  # 60 MB in short lines
        for _ in range(60):
            file.write(b"y" * 1_000_000)  # 60 MB in one line
    done = subprocess.run(
        [sys.executable, "-c", READ_ALL, path], capture_output=True, text=True, check=True,
        cwd=Path(__file__).parents[4],
    )  # fmt: skip
    count, kilobytes = map(int, done.stdout.split())
    assert count == 300_001
    assert kilobytes < 45_000  # twice the limit of a line, and a chunk
