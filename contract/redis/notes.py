"""Notes on requests of a batch that RETRY may run again (lua/common.lua writes them)."""

from __future__ import annotations

from typing import NamedTuple


class Note(NamedTuple):
    """How a request ended, and how many bytes its message has.

    Notes of protocol 1 hold the message themselves, and no outcome: the result says it.
    """

    outcome: str
    size: int
    message: bytes = b""


def read_note(raw: bytes) -> Note:
    """Return what a note says: `warmq:batches` NUL outcome NUL bytes NUL home, or of protocol 1
    home NUL message."""
    _, first, *rest = raw.split(b"\0", 3)
    return Note(first.decode(), int(rest[0])) if rest else Note("", len(first), first)
