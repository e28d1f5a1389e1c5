"""What a submit reads: lines with numbers, which most sources can give again from the start.

A file of lines is one (reader.py), and so is a Python iterable (items.py). Where a line is made
from something else, the chunks say how to tell what is wrong with it in its own terms (`told`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, Self

from producer.input.reader import RawChunk


class Source(Protocol):
    """One input. Opening it reads nothing yet."""

    @property
    def name(self) -> str:
        """What messages call it."""

    @property
    def size(self) -> float | None:
        """How much there is, in the unit that `position` counts; None where nobody knows."""

    @property
    def position(self) -> float:
        """How much of `size` was read."""

    @property
    def repeatable(self) -> bool:
        """Whether it can be read again from its start."""

    def again(self) -> Self:
        """Return the same source from its start, where it is `repeatable`."""

    def fingerprint(self) -> str:
        """Return what another source hardly has; '' where it cannot be known before it is read."""

    def chunks(self, seed: str | None, max_line_bytes: int) -> Iterator[RawChunk]:
        """Yield its lines, as `reader.chunks` does; once only.

        Raises:
            InputUnreadable: it is damaged.
        """

    def close(self) -> None:
        """Give back what it holds."""
