"""One caller's wait for one online request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from contract.errors import StoreUnavailable
from contract.streaming import Piece
from gateway.redis.live import Push


class Gone(Exception):
    """The caller has hung up."""


class Late(Exception):
    """There was no answer in time."""


def nothing() -> None:
    """Do nothing: nobody wants to know."""


class Waiter:
    """One caller's wait for one request.

    `ending` is set to the stored result, or to StoreUnavailable, Gone or Late. A listener's
    `pieces` are those of the text that it has not taken yet; `poke` is called when there are new
    ones, and at the end. `queued` is called once, when the message is not needed any more.
    """

    __slots__ = (
        "_heard", "ending", "pieces", "poke", "push", "pushed", "queued", "request_id",
        "text_bytes",
    )  # fmt: skip

    def __init__(self, push: Push, *, listens: bool, queued: Callable[[], None] = nothing) -> None:
        self.request_id = push.request_id
        #: Of all choices' texts that were heard of, whoever takes them: bytes, and characters of
        #: each choice.
        self.text_bytes = 0
        self._heard: dict[int, int] = {}
        self.queued = queued
        self.push = push
        self.pushed = False
        self.ending: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.pieces: list[Piece] | None = [] if listens else None
        self.poke: Callable[[], None] = nothing

    def has_result(self) -> bool:
        """Whether the stored result is there."""
        ending = self.ending  # cancelled with the task that awaits it, when the gateway stops
        return ending.done() and not ending.cancelled() and ending.exception() is None

    def hear(self, piece: Piece) -> None:
        """Take in a piece of the text."""
        if self.pieces is None:
            return
        have, end = self._heard.get(piece.choice, 0), piece.at + len(piece.text)
        if end > have:
            self.text_bytes += len(piece.text[max(0, have - piece.at) :].encode(errors="replace"))
            self._heard[piece.choice] = end
        self.pieces.append(piece)
        self.poke()

    def forget_message(self) -> None:
        """Hold the message no longer: it may be megabytes, and its answer may take an hour."""
        self.push = self.push._replace(message=b"")
        self.queued()

    def lost_store(self) -> bool:
        """Whether Redis was away, or took no more."""
        ending = self.ending
        if not ending.done() or ending.cancelled():
            return False
        return isinstance(ending.exception(), StoreUnavailable)

    def end(self, how: bytes | Exception) -> None:
        """Set the ending, unless it has one."""
        if self.ending.done():
            return
        if isinstance(how, Exception):
            self.ending.set_exception(how)
            self.ending.exception()  # who waits has perhaps gone
        else:
            self.ending.set_result(how)
        self.poke()
