"""Makes an event loop's Redis calls: retries them while Redis restarts, and combines them."""

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
    """Return the result of a call, retried for 1.5 s while Redis is unreachable.

    Raises:
        StoreUnavailable: The last try failed. Only StoreUnreachable is retried.
    """
    for wait_s in WAITS_S:
        try:
            return await call()
        except StoreUnreachable:
            await client.connection_pool.disconnect(inuse_connections=False)
            await asyncio.sleep(wait_s)
    return await call()


class AsyncCalls:
    """Base of classes that call one Redis from an event loop. Calls raise StoreUnavailable."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    @classmethod
    def open(cls, url: str, name: str) -> Self:
        """Return an object that connects at its first call; Redis's CLIENT LIST shows `name`."""
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
    """Combines questions into sequential calls of `ask`, each with up to `most` questions."""

    def __init__(self, ask: Callable[[list[Q]], Awaitable[Sequence[A]]], most: int = 500) -> None:
        self._ask = ask
        self._most = most
        self._waiting: deque[tuple[Q, asyncio.Future[A]]] = deque()
        self._asking: asyncio.Task[None] | None = None

    def put(self, question: Q) -> asyncio.Future[A]:
        """Return a future that gets the answer, or the error of `ask`."""
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        # This marks the error as retrieved: asyncio would log it if nobody waits any more.
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
