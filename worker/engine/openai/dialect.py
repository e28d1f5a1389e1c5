"""What one server's streams are like, as far as was seen: no setting names it, answers show it."""

import re
from dataclasses import dataclass, field

from worker.engine.openai.retries import Unanswered

#: Fields that no line asks for, and how a server names them that refuses one; where it quotes what
#: it was sent, as FastAPI's do, a colon follows.
OURS = {
    "stream_options": re.compile(r"\bstream_options\b(?!['\"]\s*:)"),
    "stream": re.compile(r"\bstream(ing)?\b(?!['\"]\s*:)", re.IGNORECASE),
}
#: A server that ends so many whole streams in a row without [DONE] has left off sending it.
MISSED = 2
#: Statuses of a refused field.
_REFUSED = (400, 422, 501)


@dataclass(slots=True)
class Dialect:
    """What was seen of one server at one url.

    `sends_done`: its streams end with [DONE]; `missed`: so many whole ones in a row did not;
    `streamed`: it has answered with a stream; `refused`: which of OURS it does not take;
    `short`: so many answers in a row were whole and had fewer choices than were asked for.
    """

    sends_done: bool = False
    missed: int = 0
    streamed: bool = False
    refused: set[str] = field(default_factory=set)
    short: int = 0

    def lost(self, *, done: bool, used: bool) -> bool:
        """Note a stream of ended choices; return whether it was cut all the same.

        `done`: it ended with [DONE]; `used`: its usage came. An error may be missing, too.
        """
        self.streamed = True
        if done:
            self.sends_done, self.missed = True, 0
            return False
        lost = self.sends_done and self.missed < MISSED
        self.missed += lost and used
        return lost

    def learn(self, left_out: set[str]) -> None:
        """Note that an answer came after these fields were left out.

        Where streams were answered before, it is this request that cannot be streamed.
        """
        self.refused |= left_out - {"stream"} if self.streamed else left_out


def refused_field(fault: Unanswered, sent: dict[str, object]) -> str | None:
    """Return which of our own fields a server refuses, if it names one that was sent."""
    if fault.what in _REFUSED:
        words = f"{fault.message} {fault.error}"
        for name, naming in OURS.items():
            if name in sent and naming.search(words):
                return name
    return None
