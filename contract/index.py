"""A batch's index: which lines it has, in chunks as they were queued."""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from contract import naming

#: A line's number, its custom_id, and whether its request id is derived from the number. A fourth
#: part, where there is one, is the request id of its leader: the line is a follower, which has no
#: message and no result of its own, and is answered by its leader's (`submit --dedupe`).
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
    """Read one text of a batch's list of finished requests.

    Returns:
        The request id, and the numbers of those followers whose ending this is: none where it is
        the request's own. After a leader's own ending comes that of its followers; followers that
        were queued after their leader ended have one of theirs.
    """
    request_id, *numbers = text.split("\0")
    first, last = map(int, numbers) if numbers else (1, 0)
    return request_id, range(first, last + 1)


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
            naming.line_request_id(batch_id, e[0]) if e[2] else naming.request_id(batch_id, e[1])
            for e in self.entries
        ]
