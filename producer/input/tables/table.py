"""What a table is to those who read it: columns, and rows from the first to the last."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

#: A row by columns.
Row = Mapping[str, Any]


class Table(Protocol):
    """One file of a table. Opening it reads its columns."""

    @property
    def columns(self) -> Sequence[str]:
        """The names of its columns."""

    @property
    def rows(self) -> int | None:
        """How many rows it has, None where it does not say so in advance."""

    def read(self, wanted: Sequence[str]) -> Iterator[Row | bytes]:
        """Yield its rows, with the columns that are wanted; for one that is damaged, the line that
        tells its error (rows.bad_row).

        Raises:
            InputUnreadable: it is damaged.
        """

    def close(self) -> None:
        """Give back what it holds."""
