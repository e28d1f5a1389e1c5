"""Files that stand for more than they hold: reading one has an end, and can be ended before."""

from __future__ import annotations

import gzip
import io
import time
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
import zstandard
from kit.hostile.bombs import MB, bombs, gzip_of, line, with_nested, zstd_of

from gateway.batches.api.record import BatchPart
from gateway.batches.runner.input_file import model_of, validate_input
from gateway.batches.runner.queueing import PartLines
from gateway.file_store import lines_of
from gateway.page.file_plan import HEAD_BYTES, named_in
from producer.input import decompression, reader
from producer.input.reader import MOST_BLANKS, Input, InputUnreadable, chunks

URL = "/v1/chat/completions"
LIMIT = 2**20


def requests_of(path: Path) -> int:
    with closing(Input(str(path))) as source:
        return sum(len(chunk.lines) for chunk in source.chunks("00" * 32, LIMIT))


def written(folder: Path, content: bytes) -> Path:
    path = folder / "file"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("name", "content", "code", "told"), [pytest.param(*bomb, id=bomb[0]) for bomb in bombs()]
)
def test_a_bomb_ends_as_an_error_that_says_why(
    tmp_path: Path, name: str, content: bytes, code: str, told: str
):
    began = time.monotonic()
    looked = validate_input(written(tmp_path, content), URL, LIMIT, 50_000)
    assert [problem.code for problem in looked.problems][:1] == [code], name
    assert told in looked.problems[0].message
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    "content",
    [
        zstd_of(b"\n" * MB, 200),
        b"\n" * (3 * MOST_BLANKS),
        gzip_of(b" \r\n", 3 * MOST_BLANKS, line()),
        line() + b" " * 2**19 + b"\n" + (b"\r" * 2**19 + b"\n") * 200,
    ],
    ids=["zstd", "uncompressed", "gzip", "after a line"],
)
def test_blank_lines_are_bounded_for_everybody_who_reads(tmp_path: Path, content: bytes):
    with pytest.raises(InputUnreadable, match=r"after line \d+: .*blank lines.*take them out"):
        requests_of(written(tmp_path, content))


def test_files_with_some_blank_lines_between_requests_are_read(tmp_path: Path):
    content = b"".join(line(n) + b"\n\r\n  \n" for n in range(MOST_BLANKS // 2))
    assert requests_of(written(tmp_path, content)) == MOST_BLANKS // 2


def test_a_ratio_has_a_limit_beyond_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = written(tmp_path, zstd_of(b"a" * (LIMIT - 2) + b"\n", 20))
    assert requests_of(path) == 20
    monkeypatch.setattr(decompression, "FREE_BYTES", 10 * MB)
    with pytest.raises(InputUnreadable, match=r"after line \d+: .*more than 1000:1.*split it"):
        requests_of(path)


def test_one_prompt_again_and_again_is_honest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(decompression, "FREE_BYTES", 0)
    prompt = {"role": "system", "content": "You answer questions about a shop. " * 60}
    words, chance = ("shoes", "where", "is", "my", "order", "red", "late", "refund"), Random(1)
    asked = (" ".join(chance.choices(words, k=9)) for _ in range(20_000))
    lines = [
        line(n, messages=[prompt, {"role": "user", "content": text}])
        for n, text in enumerate(asked)
    ]
    for level in (3, 19):
        packed = zstandard.ZstdCompressor(level=level).compress(b"".join(lines))
        assert requests_of(written(tmp_path, packed)) == 20_000


@pytest.mark.parametrize(
    "content",
    [
        gzip.compress(b"") * (3 * MB // 2),
        zstandard.ZstdCompressor().compress(b"") * (6 * MB),
        b"\x50\x2a\x4d\x18\0\0\0\0" * (4 * MB),
    ],
)
def test_compressed_data_that_holds_nothing_ends(tmp_path: Path, content: bytes):
    with pytest.raises(InputUnreadable, match="compressed bytes stand for only 0 bytes"):
        requests_of(written(tmp_path, content))


@pytest.mark.parametrize(
    "content",
    [
        zstd_of(b"a" * MB, 900),
        zstd_of(b"\n" * 90_000 + b"a" * (2 * MB), 1),
        gzip.compress(b"") * (MB // 8),
        zstandard.ZstdCompressor().compress(b"") * MB,
        b"a" * (64 * MB),
    ],
)
def test_reading_can_be_ended_within_a_second(tmp_path: Path, content: bytes):
    class Ended(Exception):
        pass

    # Of a core: on a busy machine others have it in between.
    looks: list[float] = [time.thread_time()]
    path = written(tmp_path, content)

    def watch() -> None:
        looks.append(time.thread_time())

    validate_input(path, URL, LIMIT, 0, watch)
    looks.append(time.thread_time())
    assert max(b - a for a, b in pairwise(looks)) < 1

    def end() -> None:
        raise Ended

    with pytest.raises(Ended):
        validate_input(path, URL, LIMIT, 0, end)


def test_an_endless_line_takes_no_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reader, "LONGEST_LINE", 8 * MB)

    class Endless(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, buffer: memoryview) -> int:
            buffer[:] = b"a" * len(buffer)
            return len(buffer)

    with pytest.raises(InputUnreadable, match="longer than 8388608 bytes"):
        list(chunks(io.BufferedReader(Endless()), None, 1000))


@pytest.mark.parametrize("depth", [200, 300, 900, 960, 990, 1020, 1030, 5000, 100_000])
def test_no_depth_is_an_error_of_ours(tmp_path: Path, depth: int):
    content = with_nested(depth)
    looked = validate_input(written(tmp_path, content), URL, LIMIT, 0)
    assert {problem.code for problem in looked.problems} <= {"invalid_json_line"}
    assert bool(looked.problems) == (depth > 1020)
    assert model_of(content) in ("m", "")
    parts = [BatchPart("a", "m", "q", ["m"]), BatchPart("b", "n", "r", ["n"])]
    assert isinstance(PartLines(parts, 0).takes(content), bool)


@pytest.mark.parametrize("short", [b"\n", b"\r\n", b"x\n", b"{}\n"])
def test_the_page_reads_of_short_lines_only_the_first(short: bytes):
    text = short * (HEAD_BYTES // len(short))
    began = time.process_time()
    assert named_in(lines_of([text])) == ({}, {})
    assert time.process_time() - began < 0.2
    urls, models = named_in(lines_of([b"\n" * 5000 + b" \r\n" + line()]))
    assert (urls, models) == ({URL: 1}, {"m": 1})
