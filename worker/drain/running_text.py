"""Publishes the text of running requests to listeners over Redis's pub/sub.

A listener is a process that reads requests' text while they run (contract/streaming.py). A tick is
one round of fetching new text from the engine (docs/decisions/0008) and publishing it. Only
requests with a listener take part, and each listener gets one publication for all its requests. A
tick follows a step of the engine. The first text of a request is published immediately, later text
after PAUSE_S. Redis keeps no running text; the result has all of it.
"""

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from contract.errors import EngineDead
from contract.naming import LISTENER
from contract.openai.body import COMPLETION_URL
from contract.streaming import LISTEN_S, Piece
from worker.drain.drain import Drain
from worker.drain.events import EngineReady, FirstText, Leased
from worker.drain.in_flight import Running
from worker.drain.scripts import ERRORS
from worker.engine import NotifiesText

log = logging.getLogger(__name__)

#: Fewest seconds between two ticks that publish later text.
PAUSE_S = 0.02
#: The pause is at least this many times the processor time that a tick takes.
LOOP_PARTS = 10
#: Seconds from a failed tick to the next.
RETRY_S = 1.0
#: Most texts with a listener, because anybody may publish a subscription.
MAX_TEXTS = 10_000


class Key(NamedTuple):
    """A text: a request's id, and the listener that gets its text."""

    request_id: str
    listener: str


@dataclass(slots=True)
class _Published:
    """The text of one request that one listener has got, by choice (`texts`).

    `attempt` is the number of the delivery that the text is from; 0: no text yet. `until`
    (time.monotonic()) is when the subscription ends if its request does not run here. A listener
    with `raw` also gets text that is not the answer word for word, because parts of it may become
    tool calls or reasoning.
    """

    until: float = 0.0
    raw: bool = False
    attempt: int = 0
    texts: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class _News:
    """New pieces of one request's text for one listener.

    `before` and `after` are the texts that the listener has before and after the publication.
    """

    key: Key
    before: _Published
    running: Running
    pieces: list[Piece]
    after: _Published


class RunningText:
    """Publishes the text of the requests that run in one worker."""

    def __init__(self, drain: Drain) -> None:
        self._drain = drain
        self._published: dict[Key, _Published] = {}
        #: The keys of texts of which no piece was published yet.
        self._fresh: set[Key] = set()
        self._due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        #: The time.monotonic() before which a tick publishes first texts only.
        self._not_before = 0.0
        #: Whether ticks follow a timer, because the engine does not report new text.
        self._polls = False
        #: The last error that was logged.
        self._logged = ""
        drain.events.subscribe(Leased, self._leased)
        drain.events.subscribe(EngineReady, self._engine_ready)

    def _engine_ready(self, _: EngineReady) -> None:
        engine = self._drain.supervisor.engine
        self._polls = not isinstance(engine, NotifiesText)
        if isinstance(engine, NotifiesText):
            engine.on_text(self._stepped)

    def _stepped(self) -> None:
        if self._published:
            self._due.set()

    def _leased(self, event: Leased) -> None:
        for delivery in event.deliveries:
            if delivery.listener:
                self._add(Key(delivery.request_id, delivery.listener), _Published())

    def subscribe(self, message: Any) -> None:
        """Add a listener's subscription; the texts are published from their beginning.

        Raises:
            ValueError, KeyError, TypeError: the message is not a subscription.
        """
        if isinstance(message, list):  # a producer before 0.3.0, which reads a Redis stream
            return
        listener, raw = message["listener"], message.get("raw") is True
        if not LISTENER.fullmatch(listener):
            raise ValueError(listener)
        request_ids = message["ids"]
        if not all(isinstance(one, str) for one in request_ids):
            raise TypeError("an id is not a text")
        for request_id in request_ids:
            published = _Published(time.monotonic() + LISTEN_S, raw)
            self._add(Key(request_id, listener), published)

    def _add(self, key: Key, published: _Published) -> None:
        if key in self._published or len(self._published) < MAX_TEXTS:
            self._published[key] = published
            self._fresh.add(key)
            self._due.set()

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            await self._due.wait()
            self._due.clear()
            try:
                await self._tick()
                continue
            except ERRORS as error:
                if str(error) != self._logged:  # the same line each second would fill the log
                    self._logged = str(error)
                    log.warning("no text for listeners: %s", error, extra={"action": "no_stream"})
            except Exception:  # results do not need this text, so the drain must go on
                log.exception("no text for listeners", extra={"action": "no_stream"})
            self._due.set()
            await asyncio.sleep(RETRY_S)

    async def _tick(self) -> None:
        """Publish new text: of all requests if PAUSE_S is over, else first texts only."""
        began, used = time.monotonic(), time.thread_time()
        all_texts = began >= self._not_before
        keys = list(self._published if all_texts else self._fresh)
        news = [each for each in self._news(keys, began) if each.pieces]
        if all_texts:  # processor time, because the thread waits on a busy machine
            self._not_before = began + max(PAUSE_S, LOOP_PARTS * (time.thread_time() - used))
        if news:
            await self._publish(news)
        if self._published and (not all_texts or self._polls):
            self._tick_after(self._not_before - time.monotonic())

    def _tick_after(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        if self._timer is None or self._timer.when() <= loop.time():
            self._timer = loop.call_later(max(0.0, seconds), self._due.set)

    async def _publish(self, news: Sequence[_News]) -> None:
        by_listener: dict[str, list[Piece]] = {}
        for each in news:
            by_listener.setdefault(each.key.listener, []).extend(each.pieces)
        receivers = await self._drain.leases.publish_texts(by_listener)
        for each in news:  # after the publication: if it fails, the next tick has these pieces
            if self._published.get(each.key) is not each.before:
                continue  # the listener has subscribed again meanwhile
            if not receivers[each.key.listener]:  # the listener is gone; it may subscribe again
                self._forget(each.key)
                continue
            self._fresh.discard(each.key)
            running = each.running
            if not running.text_seen:
                running.text_seen = True
                after_s = time.monotonic() - running.since
                self._drain.events.publish(FirstText(running.delivery, after_s))
            self._published[each.key] = each.after

    def _forget(self, key: Key) -> None:
        self._published.pop(key, None)
        self._fresh.discard(key)

    def _news(self, keys: Sequence[Key], now: float) -> Iterator[_News]:
        """Yield new text of requests that run here; forget texts of requests that have ended."""
        capacity = self._drain.supervisor.capacity
        parsed = capacity is not None and capacity.parses_chats
        try:
            for key in keys:
                before = self._published[key]
                running = self._drain.in_flight.unended(key.request_id)
                if running is None:
                    if before.until < now:
                        self._forget(key)
                elif before.raw or (running.streams_answer and not (parsed and _is_chat(running))):
                    texts = self._drain.supervisor.engine.text_so_far(running.engine_id)
                    yield _news_of(key, before, running, texts)
        except EngineDead:  # the engine is being rebuilt
            return


def _is_chat(running: Running) -> bool:
    return running.delivery.url != COMPLETION_URL


def _news_of(key: Key, before: _Published, running: Running, texts: Sequence[str]) -> _News:
    """Return the new text of a request; all of it if it does not continue the published text."""
    attempt = running.delivery.attempt
    published = before.texts if before.attempt == attempt else {}
    after = _Published(before.until, before.raw, attempt, dict(published))
    news = _News(key, before, running, [], after)
    for choice, text in enumerate(texts):
        old = published.get(choice, "")
        if len(text) > len(old) and text.startswith(old):
            piece = Piece(key.request_id, attempt, choice, len(old), text[len(old) :])
            news.pieces.append(piece)
            after.texts[choice] = text
        elif not old.startswith(text):
            whole = _news_of(key, _Published(before.until, before.raw), running, texts)
            return replace(whole, before=before)
    return news
