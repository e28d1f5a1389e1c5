"""Contents that are made of the queue's results while they are sent."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.batches.api import virtual_files


def test_a_file_of_few_lines_among_many_is_sought_in_bounded_pieces() -> None:
    read = 0

    def lines() -> Iterator[bytes | None]:
        nonlocal read
        for number in range(2000):
            read += 1
            yield b"the one" if number == 1999 else None

    chunks = virtual_files._chunks(lines())
    assert next(chunks) == b""
    assert read == virtual_files.CHUNK_LINES
    assert b"".join(chunks) == b"the one\n"
