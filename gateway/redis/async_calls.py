"""Redis calls of an event loop: retried while Redis restarts, and combined into fewer calls."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, Self, TypeVar

from contract.errors import StoreUnreachable
from contract.redis.client import AsyncClient
from contract.redis.connect import connect_async

T = TypeVar("T")
#: Seconds before each further try; the first is for connections that a restart has closed.
WAITS_S = (0.0, 0.1, 0.4, 1.0)


async def retry_on_disconnect(client: AsyncClient, call: Callable[[], Awaitable[T]]) -> T:
    """Return the result of a call, which is retried for a second and a half without connection.

    Raises:
        StoreUnavailable: of the last try, or immediately any but StoreUnreachable.
    """
    for wait_s in WAITS_S:
        try:
            return await call()
        except StoreUnreachable:
            await client.connection_pool.disconnect(inuse_connections=False)
            await asyncio.sleep(wait_s)
    return await call()


class AsyncCalls:
    """Calls of an event loop to one Redis, which raise StoreUnavailable."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    @classmethod
    def open(cls, url: str, name: str) -> Self:
        """Return calls to a Redis, connected at the first one; its CLIENT LIST shows `name`."""
        return cls(connect_async(url, name))

    async def _run(self, script: str, *args: Any) -> Any:
        return await retry_on_disconnect(
            self._client, lambda: self._client.run_script(script, *args)
        )

    async def close(self) -> None:
        await self._client.aclose()


Q = TypeVar("Q")
A = TypeVar("A")


class CallCombiner(Generic[Q, A]):
    """Combines questions of one event loop into calls of `ask`, one at a time, of `most` each."""

    def __init__(self, ask: Callable[[list[Q]], Awaitable[Sequence[A]]], most: int = 500) -> None:
        self._ask = ask
        self._most = most
        self._waiting: deque[tuple[Q, asyncio.Future[A]]] = deque()
        self._asking: asyncio.Task[None] | None = None

    def put(self, question: Q) -> asyncio.Future[A]:
        """Return a future of the answer, or of the error of `ask`."""
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        # If nobody waits any more, its error need not be logged as never retrieved.
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
                except Exception as error:
                    for _, future in asked:
                        if not future.done():
                            future.set_exception(error)
                    continue
                for (_, future), answer in zip(asked, answers, strict=True):
                    if not future.done():
                        future.set_result(answer)
        finally:
            self._asking = None
