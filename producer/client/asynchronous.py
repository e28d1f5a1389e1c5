"""The client for asyncio: the same calls, each in a thread, so that none holds up the loop.

What may wait for long (`results`, `wait`, `submit`) has a thread of its own: the loop's executor
has few of them, and with all of them waiting no other call would begin, nor the program's own. The
others are one question to Redis each, and take a thread of that executor.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, Self, TypeVar, Unpack

from producer.client.batch import Batch, BatchStatus, Order, Result, Retried
from producer.client.client import Client, Request, Requests, SubmitOptions

T = TypeVar("T")
#: Results that are handed to the loop at once, and requests that are asked of it at once.
_PIECE = 250
#: Between two looks whether somebody still waits, in seconds.
_LOOK_S = 0.1


class _Stopped(Exception):
    """Nobody waits for what the thread does any more."""


class _Thread:
    """A thread that works for the loop until that is done or nobody waits for it; and what it may
    ask of the loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = threading.Event()

    def start(self, work: Callable[..., T], *args: Any, **options: Any) -> asyncio.Future[T]:
        """Begin; return what will have its result. Call `stop` when nobody waits any more."""
        context, ended = contextvars.copy_context(), Future[T]()
        ended.set_running_or_notify_cancel()

        def run() -> None:
            try:
                ended.set_result(context.run(work, *args, **options))
            except _Stopped:
                return
            except BaseException as error:
                ended.set_exception(error)

        # A program may end before it: Redis holds all that is needed to go on.
        threading.Thread(target=run, name="warmq-client", daemon=True).start()
        return asyncio.wrap_future(ended, loop=self._loop)

    async def result(self, work: Callable[..., T], *args: Any, **options: Any) -> T:
        """Begin, and wait for the result. Cancelled, it is to stop."""
        try:
            return await self.start(work, *args, **options)
        finally:
            self.stop()

    def stop(self) -> None:
        """Let the thread end as soon as it sleeps or asks."""
        self._stop.set()

    @property
    def _stopped(self) -> bool:
        return self._stop.is_set() or self._loop.is_closed()

    def sleep(self, seconds: float) -> None:
        """Sleep, unless it is to stop."""
        self._stop.wait(seconds)
        if self._stopped:
            raise _Stopped

    def ask(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Let the loop run a coroutine; return what it returns."""
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:  # the loop is closed
            coroutine.close()
            raise _Stopped from None
        while not self._stopped:
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
        return await thread.result(self._batch._wait, timeout, thread.sleep)

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
            finally:  # also where it has failed: `reading` says so
                thread.ask(pieces.put([]))

        reading = thread.start(read)
        try:
            while piece := await pieces.get():
                for result in piece:
                    yield result
            await reading
        finally:
            thread.stop()
            reading.cancel()  # what it may still raise is for nobody

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
        more, and the batch stays open; another one is read on in its thread, until the program
        ends.
        """
        thread = _Thread()
        given = thread.iterate(requests) if isinstance(requests, AsyncIterable) else requests
        return AsyncBatch(await thread.result(self._client.submit, given, **options))

    async def batch(self, batch_id: str) -> AsyncBatch:
        """Return a batch that is there. Raises BatchConflict if there is none of that id."""
        return AsyncBatch(await asyncio.to_thread(self._client.batch, batch_id))

    async def batches(self) -> list[AsyncBatch]:
        """Return all batches, newest first."""
        return [AsyncBatch(found) for found in await asyncio.to_thread(self._client.batches)]
