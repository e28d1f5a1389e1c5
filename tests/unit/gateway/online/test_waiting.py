"""Requests are queued also after Redis was away while another gateway's listener was named."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

from contract.errors import StoreUnreachable
from gateway.online.pending import CALLS, PendingRequests
from gateway.redis.online import OnlineRequests, Push, PushResult
from gateway.settings import GatewaySettings


class AwayAtAnnouncements:
    """Takes pushes of requests that it knows; is lost at each announcement."""

    def __init__(self) -> None:
        self.pushed: list[str] = []
        self.lost = asyncio.Event()

    async def push(self, pushes: Sequence[Push], **_: Any) -> list[PushResult]:
        """Note them."""
        self.pushed += [push.request_id for push in pushes]
        return [PushResult(known=True) for _ in pushes]

    async def announce(self, _: bytes) -> None:
        """Fail, once it is told to."""
        await self.lost.wait()
        raise StoreUnreachable("the connection to Redis is lost")


async def test_lost_announcements_do_not_stop_pushes() -> None:
    store = AwayAtAnnouncements()
    waiting = PendingRequests(cast(OnlineRequests, store), GatewaySettings(_env_file=None))
    asked = [f"r{n}" for n in range(CALLS + 1)]
    for known, request_id in enumerate(asked, 1):
        await waiting.ask(Push("warmq", request_id, None, b"{}"), listens=True)
        async with asyncio.timeout(5):
            while len(store.pushed) < min(known, CALLS):  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0)
    assert store.pushed == asked[:CALLS]
    store.lost.set()
    async with asyncio.timeout(5):
        while store.pushed != asked:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0)
