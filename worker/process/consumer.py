"""Celery's own consumer as this worker needs it: it serves control commands, and is patient.

No task passes through it. The drain takes requests, and what is in any other list of Redis, such as
another application's tasks, stays there. Named as the app's `worker_consumer` (worker/app.py); read
beside celery/worker/consumer/consumer.py of Celery 5.7.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from celery.worker.consumer import Consumer, connection, consumer

from worker.process.bootstep import current

log = logging.getLogger(__name__)
#: What kombu logs each second, with a traceback, while Redis takes no writes.
logging.getLogger("kombu.transport.redis").addFilter(
    lambda record: not str(record.msg).startswith("maybe_refresh_binding_expiry")
)

#: Pauses between two connections, in seconds: the first that is made, and the longest.
FIRST_S, LONGEST_S = 0.25, 2.0
#: A connection that has lasted so long is a good one.
GOOD_S = 5.0
#: Connections in a row that fail before it is told. Where Redis is away, the drain tells of it.
TOLD_AT = 5


class ControlConsumer(Consumer):
    """Celery's consumer, which consumes no queue, and connects again in silence."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # It goes on after what is no message; else Celery ends the process, and whoever can write
        # to Redis could stop every worker with one byte in the control commands' channel.
        self.connection_errors: tuple[Any, ...] = (
            *self.conninfo.connection_errors, ValueError, TypeError, AttributeError, LookupError,
        )  # fmt: skip
        self._restart_state = self
        self._failed, self._told, self._good_at = 0, False, None

    def loop_args(self) -> Any:
        """Return what Celery's loop works on: its consumer of tasks shall begin with none."""
        self.task_consumer.consume = lambda *_, **__: None
        return super().loop_args()

    def step(self) -> None:
        """Wait before the next connection, as what Celery counts its restarts with."""
        self._failed += 1
        if self._failed > 1:
            time.sleep(min(LONGEST_S, FIRST_S * 2 ** min(self._failed, 10)))

    def on_connection_error_before_connected(self, exc: Exception) -> None:
        """Note that there is no connection."""
        self._lost(exc)

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        """Let go of the connection as Celery does, which would write two lines each time."""
        connection.logger.disabled = consumer.logger.disabled = True
        try:
            super().on_connection_error_after_connected(exc)
        finally:
            consumer.logger.disabled = False
        self._lost(exc)

    def on_ready(self) -> None:
        """Begin to count the time that this connection lasts."""
        super().on_ready()
        self._good_at = self.timer.call_after(GOOD_S, self._good)

    def _lost(self, error: Exception) -> None:
        if self._good_at is not None:
            self._good_at.cancel()
        drain = current().drain
        if self._failed < TOLD_AT or self._told or (drain is not None and drain.outage.lasts):
            return
        self._told = True
        log.warning(
            "control commands are not answered: %s; requests are", error,
            extra={"action": "control_lost"},
        )  # fmt: skip

    def _good(self) -> None:
        self._failed, connection.logger.disabled = 0, False
        if self._told:
            self._told = False
            log.info("control commands are answered again", extra={"action": "control_back"})
