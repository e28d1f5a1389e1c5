"""Reads Celery's events as Flower and celery-exporter do: with Celery's own receiver and state."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

from celery import Celery

from demo.stack import eventually


class EventReader(threading.Thread):
    """Keeps all events of a Redis while the context is open."""

    def __init__(self, app: Celery) -> None:
        super().__init__(daemon=True)
        self._app = app
        self.state = app.events.State()
        self._receiver: Any = None
        self._events: list[dict[str, Any]] = []

    def run(self) -> None:
        with self._app.connection_for_read() as connection:
            self._receiver = self._app.events.Receiver(connection, handlers={"*": self._got})
            self._receiver.capture(limit=None, timeout=None, wakeup=False)

    def _got(self, event: dict[str, Any]) -> None:
        self.state.event(event)
        self._events.append(event)

    def __enter__(self) -> EventReader:
        self.start()
        eventually(lambda: self.of_workers("worker-heartbeat"), 30, "a heartbeat")
        return self

    def __exit__(self, *_: object) -> None:
        self._receiver.should_stop = True
        self.join(30)

    def of_workers(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of one type."""
        return [event for event in list(self._events) if event["type"] == kind]

    def of_requests(self) -> dict[str, list[dict[str, Any]]]:
        """Return the task events by request id, in their order."""
        found = defaultdict(list)
        for event in list(self._events):
            if event["type"].startswith("task-"):
                found[event["uuid"]].append(event)
        return dict(found)

    def kinds(self, request_id: str) -> list[str]:
        """Return what happened to a request."""
        told = self.of_requests().get(request_id, [])
        return [event["type"].removeprefix("task-") for event in told]
