"""The class `Batch` of the Python library: state, results, end and changes of a batch."""

from __future__ import annotations

import datetime as dt
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import orjson

from contract import batch as contract_batch
from contract.errors import BatchConflict
from contract.failures import failures_of
from contract.redis.batches import BatchStore
from contract.results import ResultLine
from contract.settings import Settings
from producer.batch_watch import BatchWatch
from producer.collect.answers import finish_reason_of, text_of
from producer.collect.collect import Collector
from producer.input.reader import InputUnreadable
from producer.over_http import HttpBatches
from producer.queue_workers import BatchWorkers
from producer.remedies import add_remedies
from producer.submit.resumable import ResumableSubmit
from producer.submit.run_again import open_again, program_input, run_cut_again

Order = Literal["completion", "input"]
Retried = Literal["failed", "cancelled", "expired"]
#: First and longest wait in seconds between two reads of a batch.
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.02, 0.5


def store_of(settings: Settings) -> BatchStore:
    """Open the store at the settings' address."""
    url = settings.redis_url.get_secret_value()
    return BatchStore.open(url, "warmq-client", ttl_ms=settings.result_ttl_ms)


@dataclass(frozen=True, slots=True)
class ResultError:
    """The error of a failed request. docs/reference/errors.md lists the codes."""

    code: str
    message: str
    param: str | None = None


class Result:
    """The result of one request. Its JSON is decoded on the first access."""

    def __init__(self, line: ResultLine) -> None:
        self._line = line

    @property
    def json(self) -> bytes:
        """OpenAI's batch output line, without a line end."""
        return self._line.json

    @property
    def ok(self) -> bool:
        """Whether the result is a response and not an error."""
        return not self._line.failed

    @cached_property
    def _decoded(self) -> dict[str, Any]:
        decoded: dict[str, Any] = orjson.loads(self._line.json)
        return decoded

    @property
    def custom_id(self) -> str:
        """The request's custom_id; without one, `line-` and its line number: `line-7`."""
        return str(self._decoded["custom_id"])

    @property
    def line(self) -> int:
        """Number of the request, or of its line or row, in the input, from 1."""
        return int((self._decoded["error"] or self._decoded["warmq"])["line"])

    @property
    def kept(self) -> dict[str, Any]:
        """The cells of the columns that `submit(keep=...)` named; empty without any."""
        return self._decoded.get("kept") or {}

    @property
    def body(self) -> dict[str, Any] | None:
        """The engine's response as OpenAI's API gives it; None for a failed request."""
        response = self._decoded["response"]
        return response["body"] if response else None

    @property
    def error(self) -> ResultError | None:
        """The error; None for a response."""
        error = self._decoded["error"]
        if not error:
            return None
        return ResultError(error["code"], error["message"], error.get("param"))

    @property
    def text(self) -> str | None:
        """Text of the first choice; None if there is none (embeddings, failed requests)."""
        body: object = self.body  # of any type: another program may have written the result
        return text_of(body) if isinstance(body, dict) else None

    @property
    def finish_reason(self) -> str | None:
        """Why the answer ended, in its endpoint's words; for chats `length` if at max_tokens."""
        body: object = self.body  # of any type: another program may have written the result
        return finish_reason_of(body) if isinstance(body, dict) else None

    def __repr__(self) -> str:
        what = f"text={self.text!r}" if self.ok else f"error={self.error!r}"
        return f"Result(custom_id={self.custom_id!r}, {what})"


@dataclass(frozen=True, slots=True)
class BatchStatus:
    """The state of a batch at one moment. Counters are of requests, times of Redis's clock.

    `status` is OpenAI's: validating (still being submitted), in_progress, completed, failed (no
    request is valid; `reason` has the cause), expired, cancelling, cancelled (with a `reason` if
    too many requests failed). `failures` has the number of failed requests by error code, the most
    frequent first; `cut` counts the answers that ended at their max_tokens,
    `cached` the requests that known answers answered (`reuse`).
    """

    id: str
    status: str
    total: int
    completed: int
    failed: int
    cancelled: int
    expired: int
    prompt_tokens: int
    completion_tokens: int
    created_at: dt.datetime
    finished_at: dt.datetime | None
    reason: str
    failures: dict[str, int] = field(default_factory=dict)
    cut: int = 0
    cached: int = 0

    @property
    def finished(self) -> bool:
        """Whether every request has its result."""
        return self.finished_at is not None

    @property
    def pending(self) -> int:
        """Number of requests that wait or run."""
        return self.total - self.completed - self.failed - self.cancelled - self.expired


def _status_of(batch: contract_batch.Batch) -> BatchStatus:
    def moment(ms: str) -> dt.datetime:
        return dt.datetime.fromtimestamp(int(ms) / 1000, dt.UTC)

    return BatchStatus(
        batch.id,
        batch.status,
        total=batch.number("total"),
        completed=batch.number("completed"),
        failed=batch.number("failed"),
        cancelled=batch.number("cancelled"),
        expired=batch.number("expired"),
        prompt_tokens=batch.number("prompt_tokens"),
        completion_tokens=batch.number("completion_tokens"),
        created_at=moment(batch.created),
        finished_at=moment(batch.fields["finished_at"]) if batch.finished else None,
        reason=batch.fields.get("reason", ""),
        failures={one.code: one.count for one in failures_of([batch])},
        cut=batch.number("cut"),
        cached=batch.number("cached"),
    )


class Batch:
    """One batch. Each method calls Redis.

    They raise StoreUnavailable if Redis cannot be used, and BatchChanged if the batch was deleted
    or submitted again meanwhile.
    """

    def __init__(
        self,
        store: BatchStore,
        found: contract_batch.Batch,
        settings: Settings,
        resuming: ResumableSubmit | None = None,
    ) -> None:
        self._store = store
        self._first = found
        self._settings = settings
        self._resuming = resuming

    def __getstate__(self) -> dict[str, Any]:
        """Return for pickle the batch and Redis's address with its password, not the input."""
        return {"_first": self._first, "_settings": self._settings, "_resuming": None}

    @cached_property
    def _store(self) -> BatchStore:
        return store_of(self._settings)

    @property
    def id(self) -> str:
        """The batch's id, by which `Client.batch` of any program finds the batch."""
        return self._first.id

    def __repr__(self) -> str:
        return f"Batch({self.id!r})"

    def status(self) -> BatchStatus:
        """Return the batch's current state."""
        with add_remedies():
            return _status_of(self._state())

    def wait(self, timeout: float | None = None) -> BatchStatus:
        """Wait for the batch's end; return its last state.

        Redis may lose its last writes meanwhile (a failover). Then the lost requests are queued
        again, if this object has submitted them and can iterate over them again.

        Raises:
            TimeoutError: the batch has not ended within `timeout` seconds; it continues to run.
        """
        return self._wait(timeout, time.sleep)

    def _wait(self, timeout: float | None, sleep: Callable[[float], None]) -> BatchStatus:
        until = None if timeout is None else time.monotonic() + timeout

        def follow(batch: contract_batch.Batch) -> contract_batch.Batch:
            watch, wait_s = BatchWatch(self._store, batch, "it was waited for"), _FIRST_WAIT_S
            while not (now := watch.state()).finished:
                pause_s = wait_s if until is None else min(wait_s, until - time.monotonic())
                if pause_s <= 0:
                    workers = BatchWorkers(self._store).text(now)
                    raise TimeoutError(
                        f"batch {self.id} has not ended within {timeout} s: {now.terminal} of "
                        f"{now.number('total')} requests have; {workers}"
                    )
                sleep(pause_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            return now

        with add_remedies():
            if self._resuming is not None:
                return _status_of(self._resuming.follow(self._first, follow))
            return _status_of(follow(self._first))

    def results(
        self, order: Order = "completion", *, follow: bool = True, partial: bool = False
    ) -> Iterator[Result]:
        """Yield one result for each request.

        Args:
            order: `completion` is the order in which requests end, `input` the order of the input.
            follow: wait for missing results.
            partial: with `follow=False`, yield the results so far of an unfinished batch.

        Raises:
            BatchConflict: the batch has not ended, and neither `follow` nor `partial` is given.
        """
        return self._results(order, follow, partial, time.sleep)

    def _results(
        self, order: Order, follow: bool, partial: bool, sleep: Callable[[float], None]
    ) -> Iterator[Result]:
        with add_remedies():
            now = self._state()
            if not (now.finished or follow or partial):
                raise BatchConflict(
                    f"batch {self.id} is still {now.status}: follow=True waits for it, "
                    "partial=True gives the results so far"
                )
            collector = Collector(self._store, now, follow=follow, partial=partial, sleep=sleep)
            yield from map(Result, collector.lines(order))
            collector.mark_collected()

    def __iter__(self) -> Iterator[Result]:
        """Yield the results in the order in which requests end."""
        return self.results()

    def cancel(self) -> int:
        """Cancel queued and running requests; return their number."""
        with add_remedies():
            return self._store.cancel(self._state())

    def retry(self, *also: Retried) -> int:
        """Run failed requests again, and those with the outcomes `also`; return their number."""
        with add_remedies():
            state = self._state()
            HttpBatches.using(self._store).refuse_retry(state)
            return self._store.retry(state, ["failed", *also])

    def retry_cut(self, fields: Mapping[str, Any] | None = None) -> int:
        """Run requests again whose answers ended at max_tokens; return their number.

        Requests that this object has submitted are read again, otherwise the submitted file is. In
        another program, first call `Client.submit` with the same batch_id and requests: the batch
        that it returns has the requests, and nothing runs twice.

        Args:
            fields: body fields of the new requests. Example: `{"max_tokens": 4096}`.

        Raises:
            BatchConflict: the file has other lines now; the batch is being cancelled; or all cut
                answers would be cut again (temperature 0 without a higher limit).
            InputUnreadable: the requests cannot be read again.
        """
        with add_remedies():
            state, resuming = self._state(), self._resuming
            HttpBatches.using(self._store).refuse_retry(state)
            if resuming is not None and resuming.source.repeatable:
                source = resuming.source.reopen()
            elif what := program_input(state):
                raise InputUnreadable(
                    f"this batch came from {what}; submit it again with the same batch_id, then "
                    "call retry_cut"
                )
            else:
                source = open_again(state)
            limit = self._settings.max_line_bytes
            count, text = run_cut_again(self._store, state, source, fields or {}, limit)
        if text:
            warnings.warn(f"{state.id}: {text}", UserWarning, stacklevel=2)
        return count

    def delete(self, *, force: bool = False) -> None:
        """Delete the batch and its results; `force` cancels an unfinished batch first.

        Raises BatchConflict for an unfinished batch without `force`.
        """
        with add_remedies():
            state = self._state()
            if force and not state.finished:
                self._store.cancel(state)
            if not self._store.delete(self.id, force=force):
                raise BatchConflict(
                    f"batch {self.id} is still {state.status}: force=True cancels it first"
                )

    def _state(self) -> contract_batch.Batch:
        return BatchWatch(self._store, self._first, "a program used it", may_reopen=True).state()
