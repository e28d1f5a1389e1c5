"""A batch's index: which lines it has, in chunks as they were queued."""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from contract import naming

#: A line's number, its custom_id, and whether its request id is derived from the number.
IndexEntry = tuple[int, str, bool]


@dataclass(frozen=True, slots=True)
class IndexChunk:
    """What one ENQUEUE appended.

    `cursor` is the number of physical lines read up to the chunk's end and
    `digest` the rolling digest there, in hex.
    """

    cursor: int
    digest: str
    entries: list[IndexEntry]

    def dump(self) -> bytes:
        """Return the stored form."""
        return orjson.dumps([self.cursor, self.digest, self.entries])

    @classmethod
    def load(cls, raw: bytes) -> IndexChunk:
        """Read the stored form."""
        cursor, digest, entries = orjson.loads(raw)
        return cls(cursor, digest, [tuple(entry) for entry in entries])

    def request_ids(self, batch_id: str) -> list[str]:
        """Return the request ids in line order."""
        return [
            naming.line_request_id(batch_id, line)
            if by_line
            else naming.request_id(batch_id, custom)
            for line, custom, by_line in self.entries
        ]
