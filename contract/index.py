"""A batch's index: its lines, in chunks as they were queued."""

from __future__ import annotations

from typing import NamedTuple

import orjson

from contract import naming

#: A line's number, its custom_id, and whether its request id is derived from the number. A
#: follower (`submit --dedupe`) has a fourth part, its leader's request id: it has no message, and
#: its leader's result answers it.
IndexEntry = tuple[int, str, bool] | tuple[int, str, bool, str]


def entry_request_id(batch_id: str, entry: IndexEntry) -> str:
    """Return the request id of a line."""
    line, custom_id, by_line = entry[:3]
    if by_line:
        return naming.line_request_id(batch_id, line)
    return naming.request_id(batch_id, custom_id)


def leader_of(entry: IndexEntry) -> str:
    """Return the request id of a follower's leader, '' for a line that is no follower."""
    return entry[3] if len(entry) == 4 else ""


def read_ending(text: str) -> tuple[str, range]:
    """Return the request id and follower numbers of an entry in the list of finished requests.

    No numbers: the ending is the request's own, not its followers'.
    """
    request_id, *numbers = text.split("\0")
    first, last = map(int, numbers) if numbers else (1, 0)
    return request_id, range(first, last + 1)


class IndexChunk(NamedTuple):
    """The lines of one ENQUEUE, up to physical line `cursor` with rolling `digest` (hex)."""

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
            naming.line_request_id(batch_id, e[0]) if e[2] else naming.request_id(batch_id, e[1])
            for e in self.entries
        ]
