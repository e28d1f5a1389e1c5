"""Reads and writes a batch's index: its lines, in the chunks in which they were queued."""

from __future__ import annotations

from typing import NamedTuple

import orjson

from contract import naming

#: One line: its number, its custom_id, and whether its request id is made from the number. With
#: `submit --dedupe` a line with the same body as an earlier one is a follower of that line, its
#: leader. It has the leader's request id as a fourth part, has no message, and gets the leader's
#: result.
IndexEntry = tuple[int, str, bool] | tuple[int, str, bool, str]


def entry_request_id(batch_id: str, entry: IndexEntry) -> str:
    """Return the request id of a line."""
    line, custom_id, by_line = entry[:3]
    if by_line:
        return naming.line_request_id(batch_id, line)
    return naming.request_id(batch_id, custom_id)


def leader_of(entry: IndexEntry) -> str:
    """Return the request id of a follower's leader, '' for a line that is not a follower."""
    return entry[3] if len(entry) == 4 else ""


def read_ending(text: str) -> tuple[str, range]:
    """Return the request id and the numbers of followers in an entry of a batch's `finished` list.

    Without numbers the entry is about the request itself; with numbers, about its followers with
    these numbers.
    """
    request_id, *numbers = text.split("\0")
    first, last = map(int, numbers) if numbers else (1, 0)
    return request_id, range(first, last + 1)


class IndexChunk(NamedTuple):
    """The lines of one ENQUEUE.

    `cursor` is the number of the last physical line, `digest` the hash of all lines up to it (hex).
    """

    cursor: int
    digest: str
    entries: list[IndexEntry]

    def dump(self) -> bytes:
        """Return the chunk as Redis has it, in JSON."""
        return orjson.dumps([self.cursor, self.digest, self.entries])

    @classmethod
    def load(cls, raw: bytes) -> IndexChunk:
        """Read a chunk as Redis has it."""
        cursor, digest, entries = orjson.loads(raw)
        return cls(cursor, digest, [tuple(entry) for entry in entries])

    def request_ids(self, batch_id: str) -> list[str]:
        """Return the request ids of the lines, in the lines' order."""
        return [
            naming.line_request_id(batch_id, e[0]) if e[2] else naming.request_id(batch_id, e[1])
            for e in self.entries
        ]
