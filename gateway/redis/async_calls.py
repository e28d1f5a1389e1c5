"""Calls of an event loop: they ride out a Redis that restarts, and many small ones go as one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, Self, TypeVar

from contract.errors import StoreUnreachable
from contract.redis.client import AsyncClient
from contract.redis.connect import connect_async

T = TypeVar("T")
#: Before each further try, in seconds: the first is for connections that a restart left stale.
WAITS_S = (0.0, 0.1, 0.4, 1.0)


async def retry_on_disconnect(client: AsyncClient, call: Callable[[], Awaitable[T]]) -> T:
    """Return what a call returns; try again for a second and a half if there is no connection.

    Raises:
        StoreUnavailable: of the last try, or any but StoreUnreachable of the first.
    """
    for wait_s in WAITS_S:
        try:
            return await call()
        except StoreUnreachable:
            await client.connection_pool.disconnect(inuse_connections=False)
            await asyncio.sleep(wait_s)
    return await call()


class AsyncCalls:
    """Calls of an event loop to one Redis. Each raises StoreUnavailable where it cannot be used."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    @classmethod
    def open(cls, url: str, name: str) -> Self:
        """Return calls to the Redis behind a URL; it is connected to when it is first asked.

        It shows the connections under `name`.
        """
        return cls(connect_async(url, name))

    async def _run(self, script: str, *args: Any) -> Any:
        """Run a script, and return its reply."""
        return await retry_on_disconnect(
            self._client, lambda: self._client.run_script(script, *args)
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


Q = TypeVar("Q")
A = TypeVar("A")


class CallCombiner(Generic[Q, A]):
    """Puts the questions of one event loop to `ask`, one call at a time, at most `most` in each."""

    def __init__(self, ask: Callable[[list[Q]], Awaitable[Sequence[A]]], most: int = 500) -> None:
        self._ask = ask
        self._most = most
        self._waiting: deque[tuple[Q, asyncio.Future[A]]] = deque()
        self._asking: asyncio.Task[None] | None = None

    def put(self, question: Q) -> asyncio.Future[A]:
        """Ask; the future has the answer, or what `ask` has raised."""
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        # Nobody may be left who waits for it: then its error is nobody's.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._waiting.append((question, future))
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask_all(), name="gathering")
        return future

    async def _ask_all(self) -> None:
        try:
            while self._waiting:
                count = min(self._most, len(self._waiting))
                asked = [self._waiting.popleft() for _ in range(count)]
                try:
                    answers = await self._ask([question for question, _ in asked])
                except Exception as error:  # it is raised in all who have asked
                    for _, future in asked:
                        if not future.done():
                            future.set_exception(error)
                    continue
                for (_, future), answer in zip(asked, answers, strict=True):
                    if not future.done():
                        future.set_result(answer)
        finally:
            self._asking = None
