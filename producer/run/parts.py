"""Holds the parts of a run's input: its chunks, and a window that is being submitted."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from producer.input.reader import RawChunk
from producer.submit.submit import CHUNKS_IN_FLIGHT, Submitter


@dataclass(slots=True)
class Window:
    """A window that is being submitted.

    If an earlier, interrupted run has begun it, `stored` is its last line that is in Redis, and
    `sealed` whether it ends there. `lines` is the number of its lines so far, `line` the last of
    them, `digest` the digest of the input up to that line.
    """

    submitter: Submitter
    digest: str
    stored: int
    sealed: bool
    line: int = 0
    lines: int = 0
    #: Sizes in bytes of the chunks that are being sent.
    pending: deque[int] = field(default_factory=lambda: deque(maxlen=CHUNKS_IN_FLIGHT))


class Chunks:
    """Iterates over the chunks of the input, and can show the next one."""

    def __init__(self, raws: Iterator[RawChunk]) -> None:
        self._raws = raws
        self._next: RawChunk | None = None
        #: The last line that was read; the next chunk ends with it.
        self.line = 0

    def peek(self) -> RawChunk | None:
        """Return the next chunk without taking it; None at the end."""
        if self._next is None and (found := next(self._raws, None)) is not None:
            self._next, self.line = found, found.cursor
        return self._next

    def take(self) -> RawChunk | None:
        """Take the next chunk; None at the end."""
        raw, self._next = self.peek(), None
        return raw
