"""The client for asyncio: the same calls, each in a thread, so that none holds up the loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from concurrent.futures import Future
from typing import Any, Self, TypeVar, Unpack

from producer.client.batch import Batch, Order, Retried
from producer.client.client import Client, Request, Requests
from producer.client.options import SubmitOptions
from producer.client.result import Result
from producer.client.state import BatchStatus

T = TypeVar("T")
#: Results that are handed to the loop at once, and requests that are asked of it at once.
_PIECE = 250
#: Between two looks whether somebody still waits, in seconds.
_LOOK_S = 0.1


class _Stopped(Exception):
    """Nobody waits for what the thread does any more."""


class _Thread:
    """What a thread that works for the loop may ask of it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.stop = threading.Event()

    def sleep(self, seconds: float) -> None:
        """Sleep, unless it is to stop."""
        if self.stop.wait(seconds):
            raise _Stopped

    def ask(self, coroutine: Any) -> Any:
        """Let the loop run a coroutine; return what it returns."""
        future: Future[Any] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        while not self.stop.is_set():
            try:
                return future.result(_LOOK_S)
            except TimeoutError:
                if future.done():
                    raise
        future.cancel()
        raise _Stopped

    def iterate(self, items: AsyncIterable[T]) -> Iterator[T]:
        """Iterate in the thread over what the loop gives."""
        found = aiter(items)

        async def piece() -> list[T]:
            taken: list[T] = []
            async for item in found:
                taken.append(item)
                if len(taken) == _PIECE:
                    break
            return taken

        while taken := self.ask(piece()):
            yield from taken


class AsyncBatch:
    """A batch, as `Batch` is; each call is awaited."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    @property
    def id(self) -> str:
        """Its id."""
        return self._batch.id

    def __repr__(self) -> str:
        return f"AsyncBatch({self.id!r})"

    async def status(self) -> BatchStatus:
        """Return its state as it is now."""
        return await asyncio.to_thread(self._batch.status)

    async def wait(self, timeout: float | None = None) -> BatchStatus:  # noqa: ASYNC109 - as Batch's
        """Wait for its end; return its last state. Raises TimeoutError as `Batch.wait` does."""
        thread = _Thread()
        try:
            return await asyncio.to_thread(self._batch._wait, timeout, thread.sleep)
        finally:
            thread.stop.set()

    async def results(
        self, order: Order = "completion", *, follow: bool = True, partial: bool = False
    ) -> AsyncIterator[Result]:
        """Yield one result for each request, as `Batch.results` does."""
        thread, pieces = _Thread(), asyncio.Queue[list[Result]](maxsize=2)
        ready: list[Result] = []

        def hand_over() -> None:
            if ready:
                thread.ask(pieces.put([*ready]))
                ready.clear()

        def sleep(seconds: float) -> None:
            hand_over()
            thread.sleep(seconds)

        def read() -> None:
            try:
                for result in self._batch._results(order, follow, partial, sleep):
                    ready.append(result)
                    if len(ready) == _PIECE:
                        hand_over()
                hand_over()
                thread.ask(pieces.put([]))
            except _Stopped:
                return

        reading = asyncio.ensure_future(asyncio.to_thread(read))
        try:
            while piece := await _first(pieces, reading):
                for result in piece:
                    yield result
            await reading
        finally:
            thread.stop.set()

    def __aiter__(self) -> AsyncIterator[Result]:
        """Yield the results as they come."""
        return self.results()

    async def cancel(self) -> int:
        """Cancel what has not ended; return how many requests that were."""
        return await asyncio.to_thread(self._batch.cancel)

    async def retry(self, *also: Retried) -> int:
        """Run failed requests again; return how many."""
        return await asyncio.to_thread(self._batch.retry, *also)

    async def delete(self, *, force: bool = False) -> None:
        """Delete a batch that has ended, and its results; with `force`, cancel it first."""
        await asyncio.to_thread(self._batch.delete, force=force)


async def _first(
    pieces: asyncio.Queue[list[Result]], reading: asyncio.Future[None]
) -> list[Result]:
    """Return the next piece; [] where what reads has failed."""
    if not pieces.empty():
        return pieces.get_nowait()
    getting = asyncio.ensure_future(pieces.get())
    try:
        either: list[asyncio.Future[Any]] = [getting, reading]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if getting.done():
            return getting.result()
        return [] if pieces.empty() else pieces.get_nowait()
    finally:
        getting.cancel()


class AsyncClient:
    """Submits requests and finds batches, as `Client` does; each call is awaited.

    Raises:
        SettingsError: naming what is wrong with a setting.
    """

    def __init__(self, url: str | None = None, *, queue: str | None = None) -> None:
        self._client = Client(url, queue=queue)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; batches go on."""
        await asyncio.to_thread(self._client.close)

    async def submit(
        self, requests: Requests | AsyncIterable[Request], **options: Unpack[SubmitOptions]
    ) -> AsyncBatch:
        """Queue requests as one batch; return when all are queued.

        Options, results and errors are those of `Client.submit`. An iterable that is not
        asynchronous is iterated in a thread. Cancelled, it stops asking an asynchronous one for
        more, and the batch stays open.
        """
        thread = _Thread()
        given = thread.iterate(requests) if isinstance(requests, AsyncIterable) else requests
        try:
            return AsyncBatch(await asyncio.to_thread(self._client.submit, given, **options))
        finally:
            thread.stop.set()

    async def batch(self, batch_id: str) -> AsyncBatch:
        """Return a batch that is there. Raises BatchConflict if there is none of that id."""
        return AsyncBatch(await asyncio.to_thread(self._client.batch, batch_id))

    async def batches(self) -> list[AsyncBatch]:
        """Return all batches, newest first."""
        return [AsyncBatch(found) for found in await asyncio.to_thread(self._client.batches)]
