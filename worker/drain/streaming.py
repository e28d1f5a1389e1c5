"""Writes the text of requests that somebody listens to while they run (docs/decisions/0008).

Text is fetched from the engine, not sent by it: a tick looks how far each listened-to request
is and appends what is new. With no listener there are no ticks, and nothing else asks.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

from contract import streaming
from contract.errors import EngineDead
from contract.message import Delivery
from worker.drain.endings import Ending
from worker.drain.events import Committed, FirstText
from worker.drain.loop import Drain
from worker.drain.scripts import ERRORS

log = logging.getLogger(__name__)

#: Between two looks; a person sees no steps. With many listeners a tick takes longer, and the
#: pause grows with it, so that all of them together take a tenth of the loop at most.
PAUSE_S = 0.05
SHARE = 10
RETRY_S = 1.0
#: Requests listened to at once; anybody may publish anything.
MOST = 10_000


@dataclass(slots=True)
class _Written:
    """What the stream of one request holds by now; attempt 0 is none."""

    attempt: int = 0
    texts: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Write:
    """Entries for one stream, and what it will hold then."""

    request_id: str
    entries: list[streaming.Entry]
    after: _Written
    anew: bool = False


class Streaming:
    """Streams of one worker."""

    def __init__(self, drain: Drain) -> None:
        self._drain = drain
        self._until: dict[str, float] = {}
        self._written: dict[str, _Written] = {}
        self._ended: list[Ending] = []
        self._awake = asyncio.Event()
        self._said = ""

    def heard(self, request_ids: Iterable[Any]) -> None:
        """Take in an announcement.

        Raises:
            TypeError: if it is none.
        """
        until = time.monotonic() + streaming.LISTEN_S
        for request_id in map(str, request_ids):
            if request_id in self._until or len(self._until) < MOST:
                self._until[request_id] = until
        if self._until and not self._awake.is_set():
            self._drain.events.subscribe(Committed, self._committed)
            self._awake.set()

    def _committed(self, event: Committed) -> None:
        self._ended += [
            e for e in event.endings if e.outcome and e.delivery.request_id in self._until
        ]

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._awake.wait()
            began = time.monotonic()
            self._forget(began)
            try:
                await self._tick()
                pause = max(PAUSE_S, SHARE * (time.monotonic() - began))
            except ERRORS as error:
                if str(error) != self._said:  # each second the same would fill the log
                    self._said = str(error)
                    log.warning("no text for listeners: %s", error, extra={"action": "no_stream"})
                pause = RETRY_S
            except Exception:  # results do not depend on it: the drain must not end because of it
                log.exception("no text for listeners", extra={"action": "no_stream"})
                self._ended.clear()
                pause = RETRY_S
            await asyncio.sleep(pause)

    def _forget(self, now: float) -> None:
        """Drop the requests nobody listens to any more; sleep if there are no others."""
        for request_id in [rid for rid, until in self._until.items() if until < now]:
            del self._until[request_id]
            self._written.pop(request_id, None)
        if not self._until:
            self._ended.clear()
            self._drain.events.unsubscribe(Committed, self._committed)
            self._awake.clear()

    async def _tick(self) -> None:
        ended = {e.delivery.request_id: e for e in self._ended}
        writes = [self._last_words(ending) for ending in ended.values()]
        writes += [self._news(*running) for running in self._running()]
        writes = [write for write in writes if write.entries]
        if writes:
            await self._drain.leases.stream((w.request_id, w.entries, w.anew) for w in writes)
        for write in writes:  # only now: what did not get there is written by the next tick
            self._tell_first(write)
            self._written[write.request_id] = write.after
        for request_id in ended:  # a retry of it begins anew
            self._written.pop(request_id, None)
        self._ended = [e for e in self._ended if ended.get(e.delivery.request_id) is not e]

    def _tell_first(self, write: _Write) -> None:
        before = self._written.get(write.request_id, _Written())
        known = before.texts if before.attempt == write.after.attempt else {}
        running = self._drain.in_flight.unended(write.request_id)
        if running and write.after.texts and not known:
            after_s = time.monotonic() - running.since
            self._drain.events.publish(FirstText(running.delivery, after_s))

    def _running(self) -> Iterator[tuple[Delivery, dict[int, str]]]:
        """Yield what runs here of the requests listened to, with each choice's text."""
        try:
            for request_id in self._until:
                if running := self._drain.in_flight.unended(request_id):
                    texts = self._drain.supervisor.engine.text_so_far(running.engine_id)
                    yield running.delivery, dict(enumerate(texts))
        except EngineDead:  # between two engines
            return

    def _news(self, delivery: Delivery, texts: dict[int, str]) -> _Write:
        """Return what is new of a delivery's text."""
        attempt = delivery.attempt
        before = self._written.get(delivery.request_id) or _Written()
        # A remote engine may run the request again elsewhere, and may write another text then.
        anew = before.attempt != attempt or any(
            not (text.startswith(old) or old.startswith(text))
            for text, old in ((texts.get(n, ""), old) for n, old in before.texts.items())
        )
        entries = [streaming.begin(attempt)] if anew else []
        after = _Written(attempt, {} if anew else dict(before.texts))
        for choice, text in texts.items():
            at = len(after.texts.get(choice, ""))
            if len(text) > at:
                entries.append(streaming.text(attempt, choice, at, text[at:]))
                after.texts[choice] = text
        # A first attempt makes void what is left of an earlier run (`producer retry`).
        return _Write(delivery.request_id, entries, after, anew and attempt == 1)

    def _last_words(self, ending: Ending) -> _Write:
        """Return the rest of the text, where the result continues it, and how it ended."""
        delivery = ending.delivery
        so_far = self._written.get(delivery.request_id) or _Written()
        begun = so_far.texts if so_far.attempt == delivery.attempt else {}
        texts: dict[int, str] = {}
        if ending.outcome == "completed":
            texts = streaming.texts_of(orjson.loads(ending.meta)["result"])
        whole = bool(texts) and all(texts.get(n, "").startswith(old) for n, old in begun.items())
        write = self._news(delivery, texts if whole else begun)
        write.entries.append(streaming.end(delivery.attempt, ending.outcome, whole=whole))
        return write
