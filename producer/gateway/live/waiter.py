"""One caller's wait for one online request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from contract.redis.gateway.live import Push
from contract.streaming import Piece


class Gone(Exception):
    """The caller has hung up."""


class Late(Exception):
    """There was no answer in time."""


def _nothing() -> None: ...


class Waiter:
    """One caller's wait for one request.

    `ending` is set to the stored result, or to StoreUnavailable, Gone or Late. A listener's
    `pieces` are those of the text that it has not taken yet; `poke` is called when there are new
    ones, and at the end.
    """

    __slots__ = ("ending", "pieces", "poke", "push", "pushed", "request_id")

    def __init__(self, push: Push, *, listens: bool) -> None:
        self.request_id = push.request_id
        self.push = push
        self.pushed = False
        self.ending: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.pieces: list[Piece] | None = [] if listens else None
        self.poke: Callable[[], None] = _nothing

    def has_result(self) -> bool:
        """Whether the stored result is there."""
        ending = self.ending  # cancelled with the task that awaits it, when the gateway stops
        return ending.done() and not ending.cancelled() and ending.exception() is None

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
