"""The client for asyncio, whose calls run in threads so that none blocks the loop.

Calls of `results`, `wait`, `submit` and `try_rows` may take long, so each gets a new thread: in the
loop's executor they could use up all threads. The other calls are short and use that executor.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, Self, TypeVar, Unpack

from producer.client.batch import Batch, BatchStatus, Order, Result, Retried
from producer.client.client import Client, Request, Requests, SubmitOptions
from producer.client.trial import Trial
from producer.run.trial import ROWS

T = TypeVar("T")
#: Most results or requests that a thread and the loop exchange with one call.
_CHUNK = 250
#: Seconds between two checks whether the thread should stop.
_POLL_S = 0.1


class _Stopped(Exception):
    """The caller no longer waits for the thread."""


class _Thread:
    """A thread that runs one call for the loop, until the call ends or is stopped."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = threading.Event()

    def start(self, work: Callable[..., T], *args: Any, **options: Any) -> asyncio.Future[T]:
        """Start the work; return a future of its result. The caller must call `stop`."""
        context, future = contextvars.copy_context(), Future[T]()
        future.set_running_or_notify_cancel()

        def run() -> None:
            try:
                future.set_result(context.run(work, *args, **options))
            except _Stopped:
                return
            except BaseException as error:
                future.set_exception(error)

        # A daemon, so that the program may exit: Redis has all that a later program needs to go on.
        threading.Thread(target=run, name="warmq-client", daemon=True).start()
        return asyncio.wrap_future(future, loop=self._loop)

    async def result(self, work: Callable[..., T], *args: Any, **options: Any) -> T:
        """Run the work and return its result; stop it when cancelled."""
        try:
            return await self.start(work, *args, **options)
        finally:
            self.stop()

    def stop(self) -> None:
        """End the thread at its next `sleep` or `ask`."""
        self._stop.set()

    @property
    def _stopped(self) -> bool:
        return self._stop.is_set() or self._loop.is_closed()

    def sleep(self, seconds: float) -> None:
        """Sleep in the thread. Raises _Stopped."""
        self._stop.wait(seconds)
        if self._stopped:
            raise _Stopped

    def ask(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop and return its result. Raises _Stopped."""
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:  # the loop is closed
            coroutine.close()
            raise _Stopped from None
        while not self._stopped:
            try:
                return future.result(_POLL_S)
            except TimeoutError:
                if future.done():
                    raise
        future.cancel()
        raise _Stopped

    def iterate(self, values: AsyncIterable[T]) -> Iterator[T]:
        """Iterate in the thread over an asynchronous iterable that runs in the loop."""
        iterator = aiter(values)

        async def chunk() -> list[T]:
            taken: list[T] = []
            async for value in iterator:
                taken.append(value)
                if len(taken) == _CHUNK:
                    break
            return taken

        while taken := self.ask(chunk()):
            yield from taken


class AsyncBatch:
    """A batch like `Batch`; each call is awaited."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    @property
    def id(self) -> str:
        """The batch's id."""
        return self._batch.id

    def __repr__(self) -> str:
        return f"AsyncBatch({self.id!r})"

    async def status(self) -> BatchStatus:
        """Return the batch's current state."""
        return await asyncio.to_thread(self._batch.status)

    async def wait(self, timeout: float | None = None) -> BatchStatus:  # noqa: ASYNC109 - as Batch.wait
        """Wait for the batch's end; return its last state. Raises TimeoutError."""
        thread = _Thread()
        return await thread.result(self._batch._wait, timeout, thread.sleep)

    async def results(
        self, order: Order = "completion", *, follow: bool = True, partial: bool = False
    ) -> AsyncIterator[Result]:
        """Yield one result for each request; see `Batch.results`."""
        thread, chunks = _Thread(), asyncio.Queue[list[Result]](maxsize=2)
        ready: list[Result] = []

        def hand_over() -> None:
            if ready:
                thread.ask(chunks.put([*ready]))
                ready.clear()

        def sleep(seconds: float) -> None:
            hand_over()
            thread.sleep(seconds)

        def read() -> None:
            try:
                for result in self._batch._results(order, follow, partial, sleep):
                    ready.append(result)
                    if len(ready) == _CHUNK:
                        hand_over()
                hand_over()
            finally:  # also after an error, which `await reading` raises
                thread.ask(chunks.put([]))

        reading = thread.start(read)
        try:
            while chunk := await chunks.get():
                for result in chunk:
                    yield result
            await reading
        finally:
            thread.stop()
            reading.cancel()  # the caller no longer wants the thread's errors

    def __aiter__(self) -> AsyncIterator[Result]:
        """Yield the results in the order in which requests end."""
        return self.results()

    async def cancel(self) -> int:
        """Cancel queued and running requests; return their number."""
        return await asyncio.to_thread(self._batch.cancel)

    async def retry(self, *also: Retried) -> int:
        """Run failed requests again, and those with the outcomes `also`; return their number."""
        return await asyncio.to_thread(self._batch.retry, *also)

    async def retry_cut(self, fields: Mapping[str, Any] | None = None) -> int:
        """Run requests again whose answers ended at max_tokens; see `Batch.retry_cut`."""
        return await asyncio.to_thread(self._batch.retry_cut, fields)

    async def delete(self, *, force: bool = False) -> None:
        """Delete a finished batch and its results; `force` cancels it first."""
        await asyncio.to_thread(self._batch.delete, force=force)


class AsyncClient:
    """A client like `Client`; each call is awaited."""

    def __init__(self, url: str | None = None, *, queue: str | None = None) -> None:
        self._client = Client(url, queue=queue)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; batches continue to run."""
        await asyncio.to_thread(self._client.close)

    async def submit(
        self, requests: Requests | AsyncIterable[Request], **options: Unpack[SubmitOptions]
    ) -> AsyncBatch:
        """Queue requests as one batch; return when all are queued.

        Options, results and errors are those of `Client.submit`. A synchronous iterable is
        iterated in a thread. If the call is cancelled, the batch stays open; an asynchronous
        iterable is read no further, a synchronous one is read to its end in the thread.
        """
        thread = _Thread()
        iterable = thread.iterate(requests) if isinstance(requests, AsyncIterable) else requests
        return AsyncBatch(await thread.result(self._client.submit, iterable, **options))

    async def try_rows(
        self, requests: Requests, rows: int = ROWS, **options: Unpack[SubmitOptions]
    ) -> Trial:
        """Run a few of the requests now; see `Client.try_rows`. A cancelled call cancels them."""
        thread = _Thread()
        return await thread.result(self._client._try_rows, requests, rows, thread.sleep, options)

    async def batch(self, batch_id: str) -> AsyncBatch:
        """Return an existing batch. Raises BatchNotFound for an unknown id."""
        return AsyncBatch(await asyncio.to_thread(self._client.batch, batch_id))

    async def batches(self) -> list[AsyncBatch]:
        """Return all batches, newest first."""
        return [AsyncBatch(found) for found in await asyncio.to_thread(self._client.batches)]
