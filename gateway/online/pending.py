"""Requests whose callers wait: queued together, answered as results are published."""

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
from gateway.redis.online import OnlineRequests, Push, PushResult, Subscription
from gateway.settings import GatewaySettings


class ClientGone(Exception):
    """The caller has hung up."""


class TimedOut(Exception):
    """There was no answer in time."""


def do_nothing() -> None:
    """Do nothing: nobody wants to know."""


class Waiter:
    """One caller's wait for one request.

    `ending` is set to the stored result, or to StoreUnavailable, ClientGone or
    TimedOut. A listener's
    `pieces` are those of the text that it has not taken yet; `poke` is called when there are new
    ones, and at the end. `queued` is called once, when the message is not needed any more.
    """

    __slots__ = (
        "_heard", "ending", "pieces", "poke", "push", "pushed", "queued", "request_id",
        "text_bytes",
    )  # fmt: skip

    def __init__(
        self, push: Push, *, listens: bool, queued: Callable[[], None] = do_nothing
    ) -> None:
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
        self.poke: Callable[[], None] = do_nothing

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


log = logging.getLogger(__name__)

RECONNECT_S = 0.2
CLOSE_S = 2.0
#: Calls under way at a time; what comes meanwhile goes together in the next one.
CALLS = 2
#: Requests and bytes in one call: Redis serves nobody else meanwhile.
AT_ONCE, BYTES = 500, 4 * 2**20
#: Batches may fill the queue up to the high water mark; online requests may fill half of what is
#: left of Redis' memory then, or a queue that is half as long again.
HEADROOM = 0.5


class PendingRequests:
    """All online requests of one gateway process. For its event loop alone."""

    def __init__(self, redis: OnlineRequests, settings: GatewaySettings) -> None:
        self._redis = redis
        self._high_water = 1 - (1 - settings.high_water) * HEADROOM
        self._high_water_requests = int(settings.high_water_requests * (1 + HEADROOM))
        #: Ids of this process' requests begin so: one subscription hears of all their results.
        self.name = secrets.token_hex(4)
        self._text_channel = text_channel(self.name).encode()
        self._waiters: dict[str, list[Waiter]] = {}
        self._to_push: list[Waiter] = []
        self._to_cancel: set[str] = set()
        self._calls: set[asyncio.Task[None]] = set()
        self._drops: set[asyncio.Task[None]] = set()
        self._cancelling: asyncio.Task[None] | None = None
        self._subscription: Subscription | None = None

    def new_id(self) -> str:
        """Return a fresh request id, whose result this process hears of."""
        return f"{self.name}-{secrets.token_hex(12)}"

    # -- asking ---------------------------------------------------------------------

    async def ask(
        self, push: Push, *, listens: bool, queued: Callable[[], None] = do_nothing
    ) -> Waiter:
        """Queue a request, and wait for it from now on; whoever calls must `leave`.

        `queued` is called once Redis has the message, or has refused it.

        Raises:
            StoreUnavailable: Redis is away.
        """
        waiter = Waiter(push, listens=listens, queued=queued)
        self._waiters.setdefault(push.request_id, []).append(waiter)
        if push.once_ms is not None:
            try:
                await self._hear_of(push.request_id)
            except BaseException:
                self.leave(waiter)
                raise
        self._to_push.append(waiter)
        if len(self._to_push) == 1:
            asyncio.get_running_loop().call_soon(self._push)
        return waiter

    def leave(self, waiter: Waiter) -> None:
        """Wait no more. A request without an ending is cancelled, unless a retry may ask for it."""
        waiters = self._waiters.get(waiter.request_id, [])
        if waiter in waiters:
            waiters.remove(waiter)
            if not waiters:
                del self._waiters[waiter.request_id]
                if waiter.push.once_ms is not None:
                    self._hear_no_more_of(waiter.request_id)
        if waiter.has_result() or waiter.push.once_ms is not None:
            return
        waiter.end(ClientGone())
        if waiter in self._to_push:
            self._to_push.remove(waiter)
        elif waiter.pushed:
            self._cancel(waiter.request_id)

    def _push(self) -> None:
        while self._to_push and len(self._calls) < CALLS:
            batch: list[Waiter] = []
            size = 0
            for waiter in self._to_push[:AT_ONCE]:
                size += len(waiter.push.message)
                if batch and size > BYTES:
                    break
                batch.append(waiter)
            del self._to_push[: len(batch)]
            call = asyncio.create_task(self._push_now(batch))
            self._calls.add(call)
            call.add_done_callback(self._pushed)

    def _pushed(self, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        try:
            if not call.cancelled():
                call.result()
        finally:
            self._push()

    async def _push_now(self, batch: Sequence[Waiter]) -> None:
        for waiter in batch:
            waiter.pushed = True
        try:
            replies = await self._redis.push(
                [waiter.push for waiter in batch],
                high_water=self._high_water,
                high_water_requests=self._high_water_requests,
            )
        except Exception as error:
            _fail(batch, error)
            return
        finally:
            for waiter in batch:
                waiter.forget_message()
        known = []
        for waiter, reply in zip(batch, replies, strict=True):
            if _settles(waiter, reply):
                continue
            if reply.known and waiter.pieces is not None:
                known.append(waiter.request_id)  # its message names another listener
        if known:
            with suppress(StoreUnavailable):  # text that they miss comes with the rest of it
                await self._announce(known)

    # -- cancelling -------------------------------------------------------------------

    def _cancel(self, request_id: str) -> None:
        self._to_cancel.add(request_id)
        if self._cancelling is None or self._cancelling.done():
            self._cancelling = asyncio.create_task(self._cancel_now())

    async def _cancel_now(self) -> None:
        while self._to_cancel:
            ids = list(self._to_cancel)
            try:
                await self._redis.cancel(ids)
            except StoreUnavailable:  # their deadlines end them if it stays away
                await asyncio.sleep(RECONNECT_S)
                continue
            self._to_cancel.difference_update(ids)

    async def close(self) -> None:
        """Wait, but not for long, until what was left is cancelled."""
        if self._cancelling is not None:
            await asyncio.wait([self._cancelling], timeout=CLOSE_S)

    # -- hearing ----------------------------------------------------------------------

    async def run(self) -> None:
        """Hear of results and texts until cancelled; what was missed meanwhile is looked up."""
        said = ""
        while True:
            channels = [text_channel(self.name), *map(_channel, self._once())]
            subscription = self._redis.subscription([_channel(f"{self.name}-*")], channels)
            both: list[asyncio.Task[None]] = []
            try:
                await subscription.open()
                self._subscription = subscription
                # A TaskGroup of Python 3.11 would leave this task marked as cancelled.
                works = (self._catch_up(), subscription.receive(self._heard))
                both = [asyncio.create_task(work) for work in works]
                ended, _ = await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
                for each in ended:
                    each.result()
            except StoreUnavailable as error:
                if (text := str(error)) != said:
                    said = text
                    log.warning(
                        "online requests wait for Redis: %s", text, extra={"action": "no_answers"}
                    )
            except Exception:  # a gateway that hears nothing would answer nobody any more
                log.exception(
                    "results are not heard; listening again", extra={"action": "no_answers"}
                )
            finally:
                self._subscription = None
                await cancel_all(both)
                await asyncio.gather(*both, return_exceptions=True)
                await subscription.close()
                await self._redis.reconnect()
            check_cancelled()
            await asyncio.sleep(RECONNECT_S)

    def _heard(self, channel: bytes, data: bytes) -> None:
        if channel != self._text_channel:
            request_id = channel[len(RESULT_PREFIX) :].decode(errors="replace")
            for waiter in self._waiters.get(request_id, ()):
                waiter.end(data)
            return
        try:
            pieces = decode_pieces(data)
        except ValueError:  # anybody may publish anything
            return
        for piece in pieces:
            for waiter in self._waiters.get(piece.request_id, ()):
                waiter.hear(piece)

    async def _catch_up(self) -> None:
        ids = list(self._waiters)
        for request_id, meta in zip(ids, await self._redis.results(ids), strict=True):
            for waiter in self._waiters.get(request_id, ()):
                if meta is not None:
                    waiter.end(meta)
        listening = [
            w.request_id for ws in self._waiters.values() for w in ws if w.pieces is not None
        ]
        if listening:
            await self._announce(listening)

    async def _announce(self, request_ids: Iterable[str]) -> None:
        await self._redis.announce(listen_request(self.name, request_ids))

    def _once(self) -> list[str]:
        return [rid for rid, ws in self._waiters.items() if ws[0].push.once_ms is not None]

    async def _hear_of(self, request_id: str) -> None:
        if self._subscription is None:
            raise StoreUnreachable("the connection to Redis is lost; it is being opened again")
        await self._subscription.subscribe(_channel(request_id))

    def _hear_no_more_of(self, request_id: str) -> None:
        if self._subscription is not None:
            drop = asyncio.create_task(self._drop(self._subscription, request_id))
            self._drops.add(drop)
            drop.add_done_callback(self._drops.discard)

    async def _drop(self, subscription: Subscription, request_id: str) -> None:
        if request_id not in self._waiters:
            try:
                await subscription.unsubscribe(_channel(request_id))
            except StoreUnavailable:  # the next connection hears only of what is waited for
                return


def _fail(batch: Sequence[Waiter], error: Exception) -> None:
    """End the waits for requests that could not be queued."""
    if not isinstance(error, StoreUnavailable):  # a fault of our own
        log.error("online requests are not queued", exc_info=error, extra={"action": "no_answers"})
    for waiter in batch:
        # It may be queued although the answer was lost: then `leave` cancels it.
        waiter.pushed = not isinstance(error, StoreUnavailable) or isinstance(
            error, StoreUnreachable
        )
        waiter.end(error)


def _settles(waiter: Waiter, reply: PushResult) -> bool:
    """Whether the request has its answer, or was refused."""
    if reply.meta:
        waiter.end(reply.meta)
    elif reply.full:
        waiter.pushed = False
        waiter.end(StoreFull(f"the queue is full, try again later: {reply.full}"))
    return bool(reply.meta or reply.full)


def _channel(request_id: str) -> str:
    return RESULT_PREFIX + request_id
