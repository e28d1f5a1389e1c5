"""Waits for a Redis that is away: absent, loading its data, or failing over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from redis import exceptions
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from contract.redis.client import translated
from producer.queue_workers import clock_text

T = TypeVar("T")
#: Seconds of an outage after which it is reported, and between two reports of it.
_REPORT_AFTER_S, _REPORT_EVERY_S = 1.0, 60.0
#: The longest pause in seconds between two tries.
_LONGEST_PAUSE_S = 1.0
#: Codes of the errors that Redis replies for some time after a restart, or in a failover.
_TEMPORARY = (
    "LOADING", "READONLY", "MASTERDOWN", "NOREPLICAS", "MISCONF", "BUSY", "TRYAGAIN", "CLUSTERDOWN"
)  # fmt: skip
_ERRORS = (exceptions.RedisError, OSError)


def is_away(error: BaseException) -> bool:
    """Whether an error of Redis is temporary, so that the same call may succeed later."""
    if isinstance(error, (exceptions.AuthenticationError, exceptions.AuthorizationError)):
        return False
    if isinstance(error, (exceptions.ConnectionError, exceptions.TimeoutError, OSError)):
        return True
    return any(word in str(error) for word in _TEMPORARY) and "NOPERM" not in str(error)


class Outage(Retry):
    """Repeats the calls of a client while Redis is away, and reports the outage.

    All connections and threads of a client share one object. `report` gets the texts about the
    outage. When the outage has lasted `limit_s` seconds, or after `stop`, a call raises its error.
    """

    def __init__(self, limit_s: float, report: Callable[[str], None]) -> None:
        super().__init__(ExponentialBackoff(cap=_LONGEST_PAUSE_S, base=0.05), -1, _ERRORS)
        self._limit_s, self._report = limit_s, report
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._calls = threading.local()
        self._since: float | None = None
        self._report_at = 0.0
        self._reported = False
        #: When the last reported outage ended (time.monotonic); contract/redis/reads.py reads it.
        self.back_at: float | None = None

    def __deepcopy__(self, _: object) -> Outage:
        """Return itself, because redis-py copies the object for each connection."""
        return self

    def stop(self) -> None:
        """Let waiting calls end with their errors: the program ends."""
        self._stopped.set()

    def call_with_retry(
        self,
        do: Callable[[], T],
        fail: Callable[..., Any],
        is_retryable: Callable[[Exception], bool] | None = None,
        with_failure_count: bool = False,
    ) -> T:
        """Call `do` until it succeeds; call `fail` after each error, as Retry does."""
        # Only a successful command ends the outage. A connection does not show that Redis answers,
        # because Redis may still load its data. A command connects in a nested call; redis-py
        # gives `with_failure_count` for commands, not for connections.
        nested = getattr(self._calls, "nested", False)
        self._calls.nested = True
        try:
            result = self._repeated(do, fail, is_retryable, with_failure_count)
        finally:
            self._calls.nested = nested
        if with_failure_count and not nested and self._since is not None:
            self._note_end()
        return result

    def _repeated(
        self,
        do: Callable[[], T],
        fail: Callable[..., Any],
        is_retryable: Callable[[Exception], bool] | None,
        with_failure_count: bool,
    ) -> T:
        failures = 0
        while True:
            try:
                return do()
            except _ERRORS as error:
                if not is_away(error) or (is_retryable and not is_retryable(error)):
                    raise
                failures += 1
                fail(error, failures) if with_failure_count else fail(error)
                if not self._may_wait(error):
                    raise
                self._stopped.wait(self._backoff.compute(failures))

    def _may_wait(self, error: Exception) -> bool:
        """Note an error of the outage, and report it if due; return whether to try again."""
        now = time.monotonic()
        with self._lock:
            if self._since is None:
                self._since, self._report_at = now, now + _REPORT_AFTER_S
            away_s = now - self._since
            if self._stopped.is_set() or away_s >= self._limit_s:
                return False
            if now >= self._report_at:
                self._report_at, self._reported = now + _REPORT_EVERY_S, True
                left = clock_text(self._limit_s - away_s)
                self._report(f"{translated(error).message}; waiting for Redis, up to {left} more")
            return True

    def _note_end(self) -> None:
        with self._lock:
            if self._reported and self._since is not None:
                self.back_at = time.monotonic()
                self._report(f"Redis is back after {self.back_at - self._since:.1f} s")
            self._since, self._reported = None, False
