"""The answers of the scripts that queue a batch's requests and close it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Enqueued:
    """The answer of ENQUEUE, ENQUEUE_PLANNED or SEAL: ok, gone, sealed, moved, full, at or plan.

    `cursor` and `digest` come with `moved` and `sealed`, `cursor` is the position with `at`; `text`
    is the reason of `full`, and the batch's plan with `plan`.
    """

    answer: str
    cursor: int = 0
    digest: str = ""
    text: str = ""

    @classmethod
    def of(cls, reply: list[bytes]) -> Enqueued:
        """Return a script's reply as an answer."""
        answer = reply[0].decode()
        if answer == "moved" or (answer == "sealed" and len(reply) > 1):
            return cls(answer, int(reply[1]), reply[2].decode())
        if answer == "at":
            return cls(answer, int(reply[1] or 0))
        return cls(answer, text=reply[1].decode() if len(reply) > 1 else "")
