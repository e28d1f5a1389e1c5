"""Makes Celery's task events of a drain's requests, for Flower and celery-exporter.

docs/reference/observing.md describes the events. They are made only while they are switched on
(`celery worker -E`). No event contains a prompt or an answer.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from contract.message import Delivery
from contract.results import error_of
from worker.drain.endings import Ending
from worker.drain.events import Committed, Events, HandedBack, Leased, LeasesLost, Started

#: The `type` and the other fields of an event, as JSON values.
TaskEvent = dict[str, Any]

#: Most events that wait to be sent; with more the oldest are dropped.
MOST_WAITING = 10_000
#: Most requests a second that have events; with more, Flower would be Redis's busiest client.
REQUESTS_PER_S = 50.0
#: Seconds of that rate: the requests of so many seconds may come at once.
BURST_S = 10.0
#: Most characters of a text in an event.
CHARACTERS = 200
#: The exception of `task-retried` as Celery's workers write it; celery-exporter has a label with
#: the exception's name.
_RETRIED = "Retry('handed back to the queue')"


class TaskEvents:
    """Gathers task events of at most `most_per_s` requests a second; a burst may be larger.

    A burst has at most the requests of BURST_S seconds. A request beyond that rate, or taken while
    the events were switched off, has no events; after its lease was lost it has no further ones.
    """

    def __init__(self, events: Events, most_per_s: float = REQUESTS_PER_S) -> None:
        self._events = events
        self._rate = most_per_s
        self._allowed, self._refilled = BURST_S * most_per_s, time.monotonic()
        #: The ids of the requests in flight that have events.
        self._shown: set[str] = set()
        self._waiting: deque[TaskEvent] = deque(maxlen=MOST_WAITING)
        self._on = False

    def switch(self, on: bool) -> None:
        """Start or stop gathering; must be called in the drain's event loop."""
        if on == self._on:
            return
        self._on = on
        change = self._events.subscribe if on else self._events.unsubscribe
        change(Leased, self._leased)
        change(Started, self._started)
        change(Committed, self._committed)
        change(HandedBack, self._handed_back)
        change(LeasesLost, self._leases_lost)
        self._shown.clear()

    def take(self) -> list[TaskEvent]:
        """Return the events since the last call; any thread may call this."""
        return pop_all(self._waiting)

    def _leased(self, event: Leased) -> None:
        now = time.monotonic()
        more = self._rate * (now - self._refilled)
        self._allowed = min(BURST_S * self._rate, self._allowed + more)
        self._refilled = now
        for delivery in event.deliveries:
            if self._allowed < 1:
                return
            self._allowed -= 1
            self._shown.add(delivery.request_id)
            self._add("received", delivery, **_received(delivery))

    def _started(self, event: Started) -> None:
        if event.delivery.request_id in self._shown:
            self._add("started", event.delivery)

    def _committed(self, event: Committed) -> None:
        for ending in event.endings:
            if ending.delivery.request_id not in self._shown:
                continue
            self._shown.discard(ending.delivery.request_id)
            if ending.outcome:
                kind, fields = _ended(ending)
                self._add(kind, ending.delivery, **fields)

    def _handed_back(self, event: HandedBack) -> None:
        for delivery in event.deliveries:
            if delivery.request_id in self._shown:
                self._shown.discard(delivery.request_id)
                self._add("retried", delivery, exception=_RETRIED, traceback="")

    def _leases_lost(self, event: LeasesLost) -> None:
        self._shown.difference_update(delivery.request_id for delivery in event.deliveries)

    def _add(self, kind: str, delivery: Delivery, **fields: Any) -> None:
        event = {"type": f"task-{kind}", "uuid": delivery.request_id, "timestamp": time.time()}
        self._waiting.append(event | fields)


def pop_all(waiting: deque[TaskEvent]) -> list[TaskEvent]:
    """Remove and return all events of a deque to which another thread may append."""
    return [waiting.popleft() for _ in range(len(waiting))]


def _received(delivery: Delivery) -> TaskEvent:
    named = {"batch": delivery.batch, "custom_id": delivery.custom_id, "url": delivery.url}
    headers = delivery.headers
    return {
        "name": delivery.task,
        "args": "()",
        "kwargs": repr({name: value for name, value in named.items() if value})[:CHARACTERS],
        "retries": delivery.returns,
        "eta": None,
        "expires": headers.get("expires"),
        "root_id": headers.get("root_id"),
        "parent_id": headers.get("parent_id"),
    }


def _ended(ending: Ending) -> tuple[str, TaskEvent]:
    if ending.outcome == "completed":
        tokens = f"{ending.prompt_tokens} prompt tokens, {ending.completion_tokens} written"
        return "succeeded", {"result": tokens, "runtime": ending.times.get("engine_s", 0.0)}
    if ending.outcome == "failed":
        error = error_of(ending.meta)
        text = f"{error.code}: {error.message}"[:CHARACTERS]
        return "failed", {"exception": f"{type(error).__name__}({text!r})", "traceback": ""}
    expired = ending.outcome == "expired"
    return "revoked", {"terminated": not expired, "signum": None, "expired": expired}
