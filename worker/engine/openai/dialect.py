"""The observed form of a server's streams, and the fields of ours that it refuses."""

import re
from dataclasses import dataclass, field

from worker.engine.openai.retries import Unanswered

#: Fields that the worker adds to requests, with a pattern for the error text of a server that
#: refuses the field. A name with a colon after it is a quote of the request (FastAPI's errors).
OURS = {
    "stream_options": re.compile(r"\bstream_options\b(?!['\"]\s*:)"),
    "priority": re.compile(r"\bpriority\b(?!['\"]\s*:)", re.IGNORECASE),
    "stream": re.compile(r"\bstream(ing)?\b(?!['\"]\s*:)", re.IGNORECASE),
}
#: Streams in a row without [DONE] after which a server counts as one that no longer sends it.
MISSED = 2
#: HTTP statuses with which servers refuse a field.
_REFUSED = (400, 422, 501)


@dataclass(slots=True)
class Dialect:
    """The observed form of one server's answers at one url.

    `sends_done`: its streams end with [DONE]. `missed`: complete streams in a row without [DONE].
    `streamed`: it has answered with a stream. `refused`: fields of OURS that it refuses. `short`:
    complete answers in a row with fewer choices than requested.
    """

    sends_done: bool = False
    missed: int = 0
    streamed: bool = False
    refused: set[str] = field(default_factory=set)
    short: int = 0

    def ends_early(self, *, done: bool, used: bool) -> bool:
        """Note a stream whose choices have all ended. Returns whether its end is missing.

        `done`: it ended with [DONE]. `used`: it contained `usage`. Without [DONE] an error may
        be missing, too.
        """
        self.streamed = True
        if done:
            self.sends_done, self.missed = True, 0
            return False
        lost = self.sends_done and self.missed < MISSED
        self.missed += lost and used
        return lost

    def learn(self, left_out: set[str]) -> None:
        """Note that the server answered a request that left out these fields.

        If the server has sent streams before, only this request cannot be streamed.
        """
        self.refused |= left_out - {"stream"} if self.streamed else left_out


def refused_field(fault: Unanswered, sent: dict[str, object]) -> str | None:
    """Return the field of OURS that the server refuses by name, if it was sent."""
    if fault.what in _REFUSED:
        text = f"{fault.message} {fault.error}"
        for name, pattern in OURS.items():
            if name in sent and pattern.search(text):
                return name
    return None
