"""Tells listeners the texts of running requests, as soon as the engine has them.

A listener is one process (contract/streaming.py): it hears the texts of all its requests in one
publication a tick. Text is fetched from the engine, not sent by it (docs/decisions/0008), and of
requests without a listener nothing is asked. A tick follows a step of the engine, so the first text
of a request is on its way at once; what comes later is collected for PAUSE_S. Nothing is kept in
Redis: the result, which has the whole text, repairs what was lost.
"""

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

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

#: Between two looks at requests whose text has begun; the pause grows so that looking takes a
#: tenth of the loop at most.
PAUSE_S = 0.02
SHARE = 10
RETRY_S = 1.0
#: Texts told at once; anybody may publish anything.
MOST = 10_000

Key = tuple[str, str]  # request id, listener


@dataclass(slots=True)
class _Told:
    """What a listener was told of one request's text; attempt 0 is nothing.

    `until` is when a listener is forgotten that announced itself for a request which does not run
    here, in time.monotonic(). `raw` listeners are told also what is not the answer word for word:
    of the others, a part may become tool calls or reasoning, or come with what text does not have.
    """

    until: float = 0.0
    raw: bool = False
    attempt: int = 0
    texts: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class _News:
    """Pieces of one text, and what its listener has been told once they are published."""

    key: Key
    told: _Told
    running: Running
    pieces: list[Piece]
    after: _Told


class RunningText:
    """The texts that one worker tells."""

    def __init__(self, drain: Drain) -> None:
        self._drain = drain
        self._told: dict[Key, _Told] = {}
        #: Those of which nothing was told yet.
        self._fresh: set[Key] = set()
        self._due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._not_before = 0.0
        self._looks = False
        self._said = ""
        drain.events.subscribe(Leased, self._leased)
        drain.events.subscribe(EngineReady, self._engine_ready)

    def _engine_ready(self, _: EngineReady) -> None:
        engine = self._drain.supervisor.engine
        self._looks = not isinstance(engine, NotifiesText)
        if isinstance(engine, NotifiesText):
            engine.on_text(self._stepped)

    def _stepped(self) -> None:
        if self._told:
            self._due.set()

    def _leased(self, event: Leased) -> None:
        for delivery in event.deliveries:
            if delivery.listener:
                self._add((delivery.request_id, delivery.listener), _Told())

    def heard(self, announced: Any) -> None:
        """Take in an announcement: what it names is told from its beginning.

        Raises:
            ValueError, KeyError, TypeError: if it is none.
        """
        if isinstance(announced, list):  # of a producer before 0.3.0, which waits for a stream
            return
        listener, raw = announced["listener"], announced.get("raw") is True
        if not LISTENER.fullmatch(listener):
            raise ValueError(listener)
        for request_id in map(str, announced["ids"]):
            self._add((request_id, listener), _Told(time.monotonic() + LISTEN_S, raw))

    def _add(self, key: Key, told: _Told) -> None:
        if key in self._told or len(self._told) < MOST:
            self._told[key] = told
            self._fresh.add(key)
            self._due.set()

    async def run(self) -> None:
        """Tell until cancelled."""
        while True:
            await self._due.wait()
            self._due.clear()
            try:
                await self._tick()
            except ERRORS as error:
                self._failed(error)
                await asyncio.sleep(RETRY_S)
            except Exception:  # results do not depend on it: the drain must not end because of it
                log.exception("no text for listeners", extra={"action": "no_stream"})
                await asyncio.sleep(RETRY_S)
                self._due.set()

    def _failed(self, error: BaseException) -> None:
        self._due.set()
        if str(error) != self._said:  # each second the same would fill the log
            self._said = str(error)
            log.warning("no text for listeners: %s", error, extra={"action": "no_stream"})

    async def _tick(self) -> None:
        """Tell what is new: of all texts, or between two pauses of those that begin."""
        began, used = time.monotonic(), time.thread_time()
        everything = began >= self._not_before
        which = list(self._told if everything else self._fresh)
        news = [found for found in self._news(which, began) if found.pieces]
        if everything:  # by what it used: on a busy machine it may have waited for a processor
            self._not_before = began + max(PAUSE_S, SHARE * (time.thread_time() - used))
        if news:
            await self._publish(news)
        if self._told and (not everything or self._looks):
            self._look_again(self._not_before - time.monotonic())

    def _look_again(self, after_s: float) -> None:
        loop = asyncio.get_running_loop()
        if self._timer is None or self._timer.when() <= loop.time():
            self._timer = loop.call_later(max(0.0, after_s), self._due.set)

    async def _publish(self, news: Sequence[_News]) -> None:
        by_listener: dict[str, list[Piece]] = {}
        for found in news:
            by_listener.setdefault(found.key[1], []).extend(found.pieces)
        heard = await self._drain.leases.publish_texts(by_listener)
        for found in news:  # only now: what did not get there is told by the next tick
            if self._told.get(found.key) is not found.told:
                continue  # announced anew meanwhile
            if not heard[found.key[1]]:  # nobody: it comes back with an announcement
                self._forget(found.key)
                continue
            self._fresh.discard(found.key)
            self._tell_first(found.running)
            self._told[found.key] = found.after

    def _tell_first(self, running: Running) -> None:
        if running.text_seen:
            return
        running.text_seen = True
        after_s = time.monotonic() - running.since
        self._drain.events.publish(FirstText(running.delivery, after_s))

    def _forget(self, key: Key) -> None:
        self._told.pop(key, None)
        self._fresh.discard(key)

    def _news(self, keys: Sequence[Key], now: float) -> Iterator[_News]:
        """Yield what is new of the texts that are written here; forget those that have ended."""
        capacity = self._drain.supervisor.capacity
        parsed = capacity is not None and capacity.parses_chats
        try:
            for key in keys:
                told = self._told[key]
                running = self._drain.in_flight.unended(key[0])
                if running is None:
                    if told.until < now:
                        self._forget(key)
                elif told.raw or (running.plain and not (parsed and _is_chat(running))):
                    texts = self._drain.supervisor.engine.text_so_far(running.engine_id)
                    yield _news_of(key, told, running, texts)
        except EngineDead:  # between two engines
            return


def _is_chat(running: Running) -> bool:
    return running.delivery.url != COMPLETION_URL


def _news_of(key: Key, told: _Told, running: Running, texts: Sequence[str]) -> _News:
    """Return what is new of a text: all of it where it is not the one that was told before.

    A remote engine may run the request again elsewhere, and may write another text then.
    """
    attempt = running.delivery.attempt
    known = told.texts if told.attempt == attempt else {}
    news = _News(key, told, running, [], _Told(told.until, told.raw, attempt, dict(known)))
    for choice, text in enumerate(texts):
        old = known.get(choice, "")
        if len(text) > len(old) and text.startswith(old):
            news.pieces.append(Piece(key[0], attempt, choice, len(old), text[len(old) :]))
            news.after.texts[choice] = text
        elif not old.startswith(text):
            anew = _news_of(key, _Told(told.until, told.raw), running, texts)
            return replace(anew, told=told)
    return news
