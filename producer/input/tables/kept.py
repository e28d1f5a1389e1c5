"""Keeps columns of a table that are not part of the request, for the output.

The line of a row is its request's JSON. With kept columns, a line feed and the JSON of their cells
follow. Thereby the digest of the input covers both, in any order of the lines.
"""

from __future__ import annotations

import base64
import decimal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import zstandard

from contract.naming import did_you_mean
from producer.input.iterable import bad_row
from producer.input.options import BadOption
from producer.input.reader import RawChunk
from producer.input.tables.cells import JSON, BadCell, plain, value_of

#: The value of --keep for all columns.
ALL = "all"
#: Most names that a message lists.
_SHOWN = 12
_BYTES = (bytes, bytearray, memoryview)


@dataclass(frozen=True, slots=True)
class KeptColumns:
    """The names of the kept columns; for `all` in the order of the table."""

    names: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, keep: Sequence[str], columns: Sequence[str] | None, without: Collection[str] = ()
    ) -> KeptColumns:
        """Return the columns of the option `keep`; raise BadOption for an unknown one."""
        existing = columns or ()
        kept: dict[str, None] = {}
        for text in keep:
            names = [text] if text in existing or columns is None else text.split(",")
            kept |= dict.fromkeys(existing if text == ALL else map(str.strip, names))
        for name in kept:
            if columns is not None and name not in columns:
                raise BadOption(
                    f"keep: there is no column {name!r}{did_you_mean(name, columns)}; there are "
                    f"{listed(columns)}"
                )
            if existing.count(name) > 1:
                raise BadOption(f"keep: there are two columns {name!r}; rename one")
        return cls(tuple(name for name in kept if name not in without))

    def after(self, line: bytes, row: Mapping[str, Any]) -> bytes:
        """Return a row's line with its kept cells; an unreadable cell makes it a bad row."""
        if not self.names:
            return line
        cells: dict[str, Any] = {}
        for name in self.names:
            cells[name] = None
            try:
                cells[name] = orjson.Fragment(_cell_json(name, row.get(name)))
            except BadCell as error:
                if line.startswith(b"{"):
                    custom_id = orjson.loads(line).get("custom_id")
                    line = bad_row(error.problem, error.column, custom_id)
        return line + orjson.dumps(cells, option=orjson.OPT_APPEND_NEWLINE)


def listed(names: Sequence[str]) -> str:
    """Return the first names as a list for a message."""
    shown = ", ".join(names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown


def split_kept(line: bytes) -> tuple[bytes, bytes]:
    """Return a line's request and the JSON of its kept cells, b'' without any."""
    request, _, kept = line.partition(b"\n")
    return request, kept.rstrip()


def take_columns(chunk: RawChunk) -> bytes:
    """Remove the kept cells from a chunk's lines; return them for Redis (`read_columns`).

    The bytes are the greatest line number, a line feed, and compressed lines: number, space, cells.
    """
    rows = []
    for at, (number, line) in enumerate(chunk.lines):
        request, kept = split_kept(line)
        chunk.lines[at] = (number, request)
        chunk.size -= len(kept)
        rows.append(b"%d %s" % (number, kept))
    last = max(number for number, _ in chunk.lines)
    return b"%d\n" % last + zstandard.compress(b"\n".join(rows))


def read_columns(raw: bytes) -> dict[int, bytes]:
    """Return the JSON of the kept cells by line; b'' for a line without any."""
    texts = zstandard.decompress(raw.partition(b"\n")[2]).split(b"\n")
    return {int(number): kept for number, _, kept in (text.partition(b" ") for text in texts)}


def _cell_json(column: str, value: Any) -> bytes:
    if not isinstance(value, _BYTES):  # an output can have bytes, but a request cannot
        value = value_of(column, value)
    try:
        return orjson.dumps(value, _plain, JSON)
    except TypeError as error:
        problem = f"cannot be kept: {error}; make it a text or a number"
        if isinstance(value, str):
            problem = "is not UTF-8; convert the file to UTF-8"
        raise BadCell(column, problem) from None


def _plain(value: object) -> Any:
    """Return a value for JSON: bytes as base64, a decimal with all its digits."""
    if isinstance(value, _BYTES):
        return base64.b64encode(value).decode()
    return format(value, "f") if isinstance(value, decimal.Decimal) else plain(value)
