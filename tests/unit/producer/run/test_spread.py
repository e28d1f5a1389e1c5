"""Rows of a trial: spread evenly over a file, and what they say about the whole of it."""

from __future__ import annotations

from collections import Counter

import pytest

from contract.errors import BatchConflict
from producer.input.iterable import IterableSource
from producer.input.reader import LineStream, chunks
from producer.run.trial import Spread

SEED = "00" * 32


def numbers(count: int, rows: int) -> list[int]:
    spread = Spread(rows)
    source = IterableSource([{"prompt": f"p{n}"} for n in range(count)])
    passed = sum(len(c.lines) for c in spread.watch(source.chunks(SEED, 10**6)))
    assert passed == count
    return [number for number, _ in spread.chunk().lines]


@pytest.mark.parametrize("count", [1, 2, 7, 19, 20, 21, 39, 40, 41, 500, 501, 12_345])
@pytest.mark.parametrize("rows", [1, 2, 3, 20, 100])
def test_rows_are_spread_evenly_from_the_first(count: int, rows: int) -> None:
    chosen = numbers(count, rows)
    assert len(chosen) == len(set(chosen)) == min(count, rows)
    assert chosen == sorted(chosen)
    assert chosen[0] == 1
    if rows > 2:
        gaps = [after - before for before, after in zip(chosen, [*chosen[1:], count], strict=True)]
        assert max(gaps) <= 3 * max(1, count / rows)
    assert numbers(count, rows) == chosen


@pytest.mark.parametrize("count", [40, 41, 79, 400, 1_000, 12_345, 65_536])
@pytest.mark.parametrize("period", [2, 3, 4, 8])
def test_no_kind_of_line_is_most_of_the_rows(count: int, period: int) -> None:
    kinds = Counter(number % period for number in numbers(count, 20))
    assert len(kinds) >= min(period, 5)
    assert kinds.most_common(1)[0][1] <= (14 if period == 2 else 11)


def test_a_file_without_lines_has_nothing_to_try() -> None:
    with pytest.raises(BatchConflict, match="nothing to try"):
        numbers(0, 20)


def test_a_chunk_keeps_numbers_sizes_and_reasons() -> None:
    spread = Spread(3)
    lines = LineStream(iter([b"x" * 90 + b"\n", b'{"prompt": "a"}\n', b"text\n"]))
    for _ in spread.watch(chunks(lines, SEED, 80)):
        pass
    chunk = spread.chunk()
    assert (chunk.first, chunk.cursor) == (1, 3)
    assert chunk.too_long == {1: 90}
    rows = Spread(3)
    source = IterableSource([{"prompt": "x" * 90}, {"prompt": "a"}, "text"])
    for _ in rows.watch(source.chunks(SEED, 90)):
        pass
    chunk = rows.chunk()
    assert [line[:1] for _, line in chunk.lines] == [b"[", b"{", b"["]
    assert chunk.explain is not None
