"""A batch as a program holds it: its state, its results, its end."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import orjson

from contract import batch as contract_batch
from contract.errors import BatchConflict
from contract.redis.batches import BatchStore
from contract.results import ResultLine
from contract.settings import Settings
from producer.batch_watch import BatchWatch
from producer.collect.collect import Collector
from producer.collect.parquet import text_of
from producer.remedies import add_remedies
from producer.submit.submit import ResumableSubmit

Order = Literal["completion", "input"]
Retried = Literal["failed", "cancelled", "expired"]
#: Waits between looks at a batch, in seconds.
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.02, 0.5


def store_of(settings: Settings) -> BatchStore:
    """Return the store at the settings' address.

    Raises:
        StoreUnavailable: naming the address and the remedy.
    """
    url = settings.redis_url.get_secret_value()
    return BatchStore.open(url, "warmq-client", ttl_ms=settings.result_ttl_ms)


@dataclass(frozen=True, slots=True)
class ResultError:
    """Why a request has no response. docs/reference/errors.md lists the codes."""

    code: str
    message: str
    param: str | None = None


class Result:
    """One request of a batch and what became of it. It is decoded when it is looked at."""

    def __init__(self, line: ResultLine) -> None:
        self._line = line

    @property
    def json(self) -> bytes:
        """OpenAI's batch output line, without a line end."""
        return self._line.json

    @property
    def ok(self) -> bool:
        """Whether there is a response."""
        return not self._line.failed

    @cached_property
    def _decoded(self) -> dict[str, Any]:
        decoded: dict[str, Any] = orjson.loads(self._line.json)
        return decoded

    @property
    def custom_id(self) -> str:
        """The request's own custom_id, or `line-7` for the seventh if it has none."""
        return str(self._decoded["custom_id"])

    @property
    def line(self) -> int:
        """Which line, row or request of the input it was, from 1."""
        told = self._decoded["error"] or self._decoded["warmq"]
        return int(told["line"])

    @property
    def body(self) -> dict[str, Any] | None:
        """The engine's response, as OpenAI's API would give it; None for a failed request."""
        response = self._decoded["response"]
        return response["body"] if response else None

    @property
    def error(self) -> ResultError | None:
        """What went wrong; None for a response."""
        told = self._decoded["error"]
        if not told:
            return None
        return ResultError(told["code"], told["message"], told.get("param"))

    @property
    def text(self) -> str | None:
        """The text of the first choice, of a response or message; None if there is none, as for
        embeddings and failed requests."""
        body: object = self.body  # another program may have written it
        return text_of(body) if isinstance(body, dict) else None

    def __repr__(self) -> str:
        what = f"text={self.text!r}" if self.ok else f"error={self.error!r}"
        return f"Result(custom_id={self.custom_id!r}, {what})"


@dataclass(frozen=True, slots=True)
class BatchStatus:
    """A batch at one moment. Counts are requests; times are Redis'.

    `status` is OpenAI's word: validating (still submitted), in_progress, completed, failed (no
    valid request; `reason` says why), expired, cancelling, cancelled.
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

    @property
    def finished(self) -> bool:
        """Whether every request has its result."""
        return self.finished_at is not None

    @property
    def pending(self) -> int:
        """Requests that wait or run."""
        return self.total - self.completed - self.failed - self.cancelled - self.expired


def status_of(batch: contract_batch.Batch) -> BatchStatus:
    """Return a snapshot as programs see it."""
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
        created_at=_moment(batch.created),
        finished_at=_moment(batch.fields["finished_at"]) if batch.finished else None,
        reason=batch.fields.get("reason", ""),
    )


def _moment(ms: str) -> dt.datetime:
    return dt.datetime.fromtimestamp(int(ms) / 1000, dt.UTC)


class Batch:
    """One batch. All its methods ask Redis, and raise StoreUnavailable where it cannot be used;
    BatchChanged, where the batch was deleted or submitted anew meanwhile."""

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
        """Return what another process needs to ask about the batch: Redis' address, with its
        password, and which batch it is. What was read cannot be read again there."""
        return {"_first": self._first, "_settings": self._settings, "_resuming": None}

    @cached_property
    def _store(self) -> BatchStore:
        return store_of(self._settings)

    @property
    def id(self) -> str:
        """Its id; `Client.batch` finds it again by that, from any program."""
        return self._first.id

    def __repr__(self) -> str:
        return f"Batch({self.id!r})"

    def status(self) -> BatchStatus:
        """Return its state as it is now."""
        with add_remedies():
            return status_of(self._state())

    def wait(self, timeout: float | None = None) -> BatchStatus:
        """Wait for its end; return its last state.

        What this program has submitted from what can be read again is queued once more where Redis
        loses it meanwhile (a failover).

        Raises:
            TimeoutError: it has not ended within `timeout` seconds; it goes on.
        """
        return self._wait(timeout, time.sleep)

    def _wait(self, timeout: float | None, sleep: Callable[[float], None]) -> BatchStatus:
        until = None if timeout is None else time.monotonic() + timeout

        def follow(batch: contract_batch.Batch) -> contract_batch.Batch:
            same, wait_s = BatchWatch(self._store, batch, "it was waited for"), _FIRST_WAIT_S
            while not (now := same.state()).finished:
                left = wait_s if until is None else min(wait_s, until - time.monotonic())
                if left <= 0:
                    raise TimeoutError(
                        f"batch {self.id} has not ended within {timeout} s: {now.terminal} of "
                        f"{now.number('total')} requests have"
                    )
                sleep(left)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            return now

        with add_remedies():
            if self._resuming is not None:
                return status_of(self._resuming.follow(self._first, follow))
            return status_of(follow(self._first))

    def results(
        self, order: Order = "completion", *, follow: bool = True, partial: bool = False
    ) -> Iterator[Result]:
        """Yield one result for each request.

        Args:
            order: `completion`, as they come, or `input`, that of the requests.
            follow: wait for those that are not there yet.
            partial: with `follow=False`, give what there is of a batch that has not ended.

        Raises:
            BatchConflict: the batch has not ended, and neither `follow` nor `partial` was asked
                for.
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
                    "partial=True takes what is there"
                )
            collector = Collector(self._store, now, follow=follow, partial=partial, sleep=sleep)
            yield from map(Result, collector.lines(order))
            collector.mark_collected()

    def __iter__(self) -> Iterator[Result]:
        """Yield the results as they come."""
        return self.results()

    def cancel(self) -> int:
        """Cancel what has not ended, queued or running; return how many requests that were."""
        with add_remedies():
            return self._store.cancel(self._state())

    def retry(self, *also: Retried) -> int:
        """Run failed requests again, and those that ended as `also` says; return how many."""
        with add_remedies():
            return self._store.retry(self._state(), ["failed", *also])

    def delete(self, *, force: bool = False) -> None:
        """Delete a batch that has ended, and its results; with `force`, cancel it first.

        Raises:
            BatchConflict: it has not ended.
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
        return BatchWatch(self._store, self._first, "a program held it", may_reopen=True).state()
