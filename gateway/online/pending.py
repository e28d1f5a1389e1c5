"""Queues online requests in groups, and returns results to their callers as they come."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from contract.errors import StoreFull, StoreUnavailable, StoreUnreachable
from contract.naming import RESULT_PREFIX, text_channel
from contract.streaming import Piece, decode_pieces, listen_request
from gateway.background import cancel_all, check_cancelled
from gateway.redis.online import OnlineRequests, Push, Subscription
from gateway.settings import GatewaySettings

log = logging.getLogger(__name__)

#: Seconds between two attempts to connect to Redis, and most seconds for cancellations at the end.
RECONNECT_S, CLOSE_S = 0.2, 2.0
#: Most calls to Redis in flight; requests that come meanwhile go into the next call.
CALLS = 2
#: Most requests and bytes in one call: Redis serves no other client during a call.
CALL_REQUESTS, CALL_BYTES = 500, 4 * 2**20
#: Share of the memory and of the queue above the high-water mark (WARMQ_HIGH_WATER, where batches
#: stop) that online requests may fill.
HEADROOM = 0.5


class ClientGone(Exception):
    """The caller has closed the connection."""


class TimedOut(Exception):
    """There was no answer in time."""


def do_nothing() -> None:
    """Do nothing."""


class Waiter:
    """One caller's wait for one request.

    `ending` becomes the stored result, or StoreUnavailable, ClientGone or TimedOut. `pieces` has
    the pieces of text that the caller has not taken yet, None if the caller does not listen;
    `poke` is called when there are new ones, and at the end. `on_queued` is called once the message
    is not needed any more. `text_bytes` counts the text of all choices.
    """

    __slots__ = (
        "_received", "ending", "on_queued", "pieces", "poke", "push", "pushed", "request_id",
        "text_bytes",
    )  # fmt: skip

    def __init__(
        self, push: Push, *, listens: bool, on_queued: Callable[[], None] = do_nothing
    ) -> None:
        self.request_id = push.request_id
        self.text_bytes = 0
        #: Received characters of each choice.
        self._received: dict[int, int] = {}
        self.on_queued = on_queued
        self.push = push
        self.pushed = False
        self.ending: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.pieces: list[Piece] | None = [] if listens else None
        self.poke: Callable[[], None] = do_nothing

    def has_result(self) -> bool:
        """Return whether the stored result has come."""
        return self._ended() and self.ending.exception() is None

    def lost_store(self) -> bool:
        """Return whether Redis was unreachable, or refused the request."""
        return self._ended() and isinstance(self.ending.exception(), StoreUnavailable)

    def _ended(self) -> bool:
        # `ending` is cancelled with the task that awaits it, when the gateway stops.
        return self.ending.done() and not self.ending.cancelled()

    def receive(self, piece: Piece) -> None:
        """Add a piece of the text."""
        if self.pieces is None:
            return
        have, end = self._received.get(piece.choice, 0), piece.at + len(piece.text)
        if end > have:
            self.text_bytes += len(piece.text[max(0, have - piece.at) :].encode(errors="replace"))
            self._received[piece.choice] = end
        self.pieces.append(piece)
        self.poke()

    def drop_message(self) -> None:
        """Free the message: it may have megabytes, and its answer may take an hour."""
        self.push = self.push._replace(message=b"")
        self.on_queued()

    def end(self, how: bytes | Exception) -> None:
        """Set the ending, unless it is set already."""
        if self.ending.done():
            return
        if isinstance(how, Exception):
            self.ending.set_exception(how)
            self.ending.exception()  # marks it as retrieved: its caller may be gone
        else:
            self.ending.set_result(how)
        self.poke()


class PendingRequests:
    """Holds the online requests of one gateway process; only its event loop may use it."""

    def __init__(self, redis: OnlineRequests, settings: GatewaySettings) -> None:
        self._redis = redis
        self._high_water = 1 - (1 - settings.high_water) * HEADROOM
        self._high_water_requests = int(settings.high_water_requests * (1 + HEADROOM))
        #: Prefix of this process's request ids: one subscription receives all their results.
        self.name = secrets.token_hex(4)
        self._text_channel = text_channel(self.name).encode()
        self._waiters: dict[str, list[Waiter]] = {}
        self._to_push: list[Waiter] = []
        self._to_cancel: set[str] = set()
        self._calls: set[asyncio.Task[None]] = set()
        self._unsubscribing: set[asyncio.Task[None]] = set()
        self._cancelling: asyncio.Task[None] | None = None
        self._subscription: Subscription | None = None

    def new_id(self) -> str:
        """Return a new request id, whose result this process receives."""
        return f"{self.name}-{secrets.token_hex(12)}"

    async def ask(
        self, push: Push, *, listens: bool, on_queued: Callable[[], None] = do_nothing
    ) -> Waiter:
        """Queue a request and begin to wait for its result; the caller must call `leave`.

        `on_queued` is called once Redis has the message, or has refused it.

        Raises StoreUnavailable.
        """
        waiter = Waiter(push, listens=listens, on_queued=on_queued)
        self._waiters.setdefault(push.request_id, []).append(waiter)
        if push.once_ms is not None:
            try:
                if self._subscription is None:
                    raise StoreUnreachable("the connection to Redis is lost; reconnecting")
                await self._subscription.subscribe(_channel(push.request_id))
            except BaseException:
                self.leave(waiter)
                raise
        self._to_push.append(waiter)
        if len(self._to_push) == 1:
            asyncio.get_running_loop().call_soon(self._push)
        return waiter

    def leave(self, waiter: Waiter) -> None:
        """Stop waiting; cancel the request unless it has ended or may be retried."""
        request_id, once = waiter.request_id, waiter.push.once_ms is not None
        waiters = self._waiters.get(request_id, [])
        if waiter in waiters:
            waiters.remove(waiter)
            if not waiters:
                del self._waiters[request_id]
                if once and self._subscription is not None:
                    drop = asyncio.create_task(self._unsubscribe(self._subscription, request_id))
                    self._unsubscribing.add(drop)
                    drop.add_done_callback(self._unsubscribing.discard)
        if once or waiter.has_result():
            return
        waiter.end(ClientGone())
        if waiter in self._to_push:
            self._to_push.remove(waiter)
        elif waiter.pushed:
            self._to_cancel.add(request_id)
            if self._cancelling is None or self._cancelling.done():
                self._cancelling = asyncio.create_task(self._cancel())

    async def _unsubscribe(self, subscription: Subscription, request_id: str) -> None:
        if request_id not in self._waiters:
            with suppress(StoreUnavailable):  # the next connection does not subscribe to it
                await subscription.unsubscribe(_channel(request_id))

    def _push(self) -> None:
        while self._to_push and len(self._calls) < CALLS:
            group: list[Waiter] = []
            size = 0
            for waiter in self._to_push[:CALL_REQUESTS]:
                size += len(waiter.push.message)
                if group and size > CALL_BYTES:
                    break
                group.append(waiter)
            del self._to_push[: len(group)]
            call = asyncio.create_task(self._push_now(group))
            self._calls.add(call)
            call.add_done_callback(self._end_call)

    def _end_call(self, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        try:
            if not call.cancelled():
                call.result()
        finally:
            self._push()

    async def _push_now(self, group: Sequence[Waiter]) -> None:
        for waiter in group:
            waiter.pushed = True
        try:
            replies = await self._redis.push(
                [waiter.push for waiter in group],
                high_water=self._high_water,
                high_water_requests=self._high_water_requests,
            )
        except Exception as error:
            _fail(group, error)
            return
        finally:
            for waiter in group:
                waiter.drop_message()
        known_ids = []
        for waiter, reply in zip(group, replies, strict=True):
            if reply.meta:
                waiter.end(reply.meta)
            elif reply.full:
                waiter.pushed = False
                waiter.end(StoreFull(f"the queue is full, try again later: {reply.full}"))
            elif reply.known and waiter.pieces is not None:
                # The queued message names another gateway as the listener.
                known_ids.append(waiter.request_id)
        if known_ids:
            with suppress(StoreUnavailable):  # the result has the missing text
                await self._announce(known_ids)

    async def _cancel(self) -> None:
        while self._to_cancel:
            ids = list(self._to_cancel)
            try:
                await self._redis.cancel(ids)
            except StoreUnavailable:  # deadlines end them if Redis does not come back
                await asyncio.sleep(RECONNECT_S)
                continue
            self._to_cancel.difference_update(ids)

    async def close(self) -> None:
        """Wait briefly until the requests that were left are cancelled."""
        if self._cancelling is not None:
            await asyncio.wait([self._cancelling], timeout=CLOSE_S)

    async def run(self) -> None:
        """Receive results and texts until cancelled; look up results missed while disconnected."""
        last_error = ""
        while True:
            once_ids = [rid for rid, ws in self._waiters.items() if ws[0].push.once_ms is not None]
            channels = [text_channel(self.name), *map(_channel, once_ids)]
            subscription = self._redis.subscription([_channel(f"{self.name}-*")], channels)
            tasks: list[asyncio.Task[None]] = []
            try:
                await subscription.open()
                self._subscription = subscription
                # A TaskGroup of Python 3.11 would leave this task marked as cancelled.
                works = (self._catch_up(), subscription.receive(self._receive))
                tasks = [asyncio.create_task(work) for work in works]
                ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
                for each in ended:
                    each.result()
            except StoreUnavailable as error:
                if str(error) != last_error:
                    last_error = str(error)
                    extra = {"action": "no_answers"}
                    log.warning("online requests wait for Redis: %s", last_error, extra=extra)
            except Exception:  # without this loop no caller gets an answer
                extra = {"action": "no_answers"}
                log.exception(
                    "results cannot be received; the subscription is opened again", extra=extra
                )
            finally:
                self._subscription = None
                await cancel_all(tasks)
                await asyncio.gather(*tasks, return_exceptions=True)
                await subscription.close()
                await self._redis.reconnect()
            check_cancelled()
            await asyncio.sleep(RECONNECT_S)

    def _receive(self, channel: bytes, data: bytes) -> None:
        if channel != self._text_channel:
            request_id = channel[len(RESULT_PREFIX) :].decode(errors="replace")
            for waiter in self._waiters.get(request_id, ()):
                waiter.end(data)
            return
        with suppress(ValueError):  # any program may publish anything
            for piece in decode_pieces(data):
                for waiter in self._waiters.get(piece.request_id, ()):
                    waiter.receive(piece)

    async def _catch_up(self) -> None:
        ids = list(self._waiters)
        for request_id, meta in zip(ids, await self._redis.results(ids), strict=True):
            for waiter in self._waiters.get(request_id, ()):
                if meta is not None:
                    waiter.end(meta)
        waiters = (waiter for waiters in self._waiters.values() for waiter in waiters)
        listening = [waiter.request_id for waiter in waiters if waiter.pieces is not None]
        if listening:
            await self._announce(listening)

    async def _announce(self, request_ids: Iterable[str]) -> None:
        await self._redis.announce(listen_request(self.name, request_ids))


def _fail(group: Sequence[Waiter], error: Exception) -> None:
    """End the waits for requests that could not be queued."""
    unavailable = isinstance(error, StoreUnavailable)
    if not unavailable:  # a bug
        log.error("online requests are not queued", exc_info=error, extra={"action": "no_answers"})
    for waiter in group:
        # The request may be queued although the reply was lost; then `leave` cancels it.
        waiter.pushed = not unavailable or isinstance(error, StoreUnreachable)
        waiter.end(error)


def _channel(request_id: str) -> str:
    return RESULT_PREFIX + request_id
