"""Detects that a batch was deleted or replaced, or that Redis has lost writes to it.

It also creates the errors of submits, and repeats ENQUEUE while Redis is full.
"""

import threading
import time
from collections.abc import Callable

from contract.batch import Batch
from contract.errors import BatchConflict, BatchNotFound, Remedy, WarmqError
from contract.naming import did_you_mean
from contract.redis.batches import BatchStore
from contract.redis.connect import masked
from contract.redis.enqueued import Enqueued
from contract.redis.objects import Objects
from contract.settings import Settings

#: Seconds within which Redis removes all keys of an expired batch, one after the other.
_EXPIRY_TAKES_S = 1.0
#: Seconds of the first and of the longest wait for a full Redis; each wait is twice the one before.
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 2.0


class BatchChanged(WarmqError):
    """A batch was deleted, replaced, retried or reset while it was read or followed."""

    code = "batch_changed"


class WritesLost(BatchChanged):
    """Redis has lost writes that it had confirmed, for example in a failover."""

    def __init__(self, batch_id: str, lost: str, remedy: Remedy = "resume_submit") -> None:
        message = f"Redis has lost its last writes (a failover?): {lost}"
        super().__init__(message, remedy=remedy, batch_id=batch_id)


class BatchWatch:
    """Reads one batch repeatedly; raises BatchChanged if it is no longer the same batch.

    `first` and `last` are the batch as first and as last read. `doing` completes error messages:
    "deleted while {doing}". A batch that is gone after connections to Redis broke is lost
    (WritesLost). With `may_reopen`, it is not an error that a failover of Redis has unsealed the
    batch (a sealed batch is completely submitted).
    """

    def __init__(
        self, store: BatchStore, batch: Batch, doing: str, *, may_reopen: bool = False
    ) -> None:
        self.first = self.last = batch
        self._store, self._doing, self._may_reopen = store, doing, may_reopen
        self._expires_at: float | None = None

    def state(self) -> Batch:
        """Read the batch; raise BatchChanged if it was deleted, replaced or unsealed."""
        asked_at = time.monotonic()
        batch = self._store.batch(self.first.id)
        # Redis may have lost the batch if connections to it broke since it had it.
        may_be_lost = self._store.reconnects > self.last.reconnects
        if batch is None and may_be_lost and not self._expired():
            raise batch_lost(self.first.id, "submit_again")
        if batch is None or batch.status == "deleting":
            raise self._gone()
        # Two batches with one id may have been created in the same millisecond; `life` differs.
        if any(batch.fields.get(n) != self.first.fields.get(n) for n in ("created_at", "life")):
            if may_be_lost:
                raise batch_lost(self.first.id, "read_new_batch")
            raise self._changed(
                f"was deleted and submitted again while {self._doing}", "read_new_batch"
            )
        if self.last.sealed and not batch.sealed and not self._may_reopen:
            raise end_lost(batch.id)
        self.last = batch
        if batch.finished:
            left_s = self._store.expires_in_s(batch.id)
            self._expires_at = None if left_s is None else asked_at + left_s
        return batch

    def incomplete(self, results: int) -> BatchChanged:
        """Return the error for a batch that gave only `results` results."""
        first, last = self.first, self.last
        total = last.number("total")
        if last.number("retried") != first.number("retried"):
            what = f"was retried while {self._doing}: some of its requests run again"
            return self._changed(what, "follow_results")
        if not last.finished and first.finished:
            lost = f"some requests of batch {last.id} run again"
            return WritesLost(last.id, lost, "follow_results")
        if not last.finished:
            what = f"is still {last.status}: {last.terminal} of {total} requests have ended"
            return self._changed(what, "follow_results")
        if self._expired(_EXPIRY_TAKES_S):
            return self._gone(_EXPIRY_TAKES_S)
        what = f"gave only {results} of its {total} requests: its index in Redis is incomplete"
        return self._changed(what, "report")

    def _expired(self, early_s: float = 0.0) -> bool:
        """Whether the batch has expired, or expires within `early_s` seconds."""
        return self._expires_at is not None and time.monotonic() >= self._expires_at - early_s

    def _gone(self, early_s: float = 0.0) -> BatchChanged:
        if self._expired(early_s):
            return self._changed(f"expired while {self._doing}", "collect_earlier")
        what = f"was deleted while {self._doing}, or Redis was emptied"
        return self._changed(what, "submit_again")

    def _changed(self, what: str, remedy: Remedy) -> BatchChanged:
        batch_id = self.first.id
        return BatchChanged(f"batch {batch_id} {what}", remedy=remedy, batch_id=batch_id)


def find_batch(store: BatchStore, settings: Settings, batch_id: str, hint: str = "") -> Batch:
    """Return a batch; raise BatchNotFound if it does not exist.

    The error suggests a similar id; if none is similar, it ends with `hint`.
    """
    batch = store.batch(batch_id)
    if batch is None:
        if Objects.using(store).get_many("batch", [batch_id])[0] is not None:
            raise BatchNotFound(
                f"batch {batch_id} came over HTTP, and has no requests in the queue (while no "
                f"worker runs, it waits): GET /v1/batches/{batch_id} and the page have its state"
            )
        where = masked(settings.redis_url.get_secret_value())
        near = did_you_mean(batch_id, store.newest_ids()) or hint
        raise BatchNotFound(f"there is no batch {batch_id} (any more) in {where}{near}")
    return batch


def different_file(batch_id: str, where: str) -> BatchConflict:
    """Return the error for a batch that was submitted from another file or other requests."""
    return BatchConflict(
        f"batch {batch_id} was submitted from a different file: {where}", remedy="new_batch_id"
    )


def batch_closed(batch_id: str, before: str) -> BatchConflict:
    """Return the error for a batch that was closed before `before`, a line or an event."""
    return BatchConflict(
        f"batch {batch_id} was closed before {before} (cancelled, or submitted from a shorter "
        "file)",
        remedy="new_batch_id",
    )


def end_lost(batch_id: str) -> WritesLost:
    """Return the error for a batch that Redis no longer has as completely submitted."""
    return WritesLost(batch_id, f"batch {batch_id} is not submitted to its end any more")


def batch_lost(batch_id: str, remedy: Remedy) -> WritesLost:
    """Return the error for a batch that Redis has lost as a whole."""
    return WritesLost(batch_id, f"batch {batch_id} is not there any more", remedy)


class Submitted:
    """A batch to which requests are sent: knows whether it was deleted or lost if it is gone."""

    def __init__(self, store: BatchStore, batch: Batch) -> None:
        self.batch, self._store = batch, store
        #: The store's reconnects before it saw the batch last.
        self._seen = batch.reconnects

    def send(self, send: Callable[[], Enqueued]) -> Enqueued:
        """Return the answer of `send`."""
        before = self._store.reconnects
        answer = send()
        if answer.answer != "gone":
            self._seen = before
        return answer

    def gone(self) -> BatchChanged:
        """Return the error for the batch that is gone."""
        batch_id = self.batch.id
        remedy: Remedy = "submit_from_start"
        if self._store.reconnects > self._seen:
            return batch_lost(batch_id, remedy)
        what = "was deleted while it was submitted, or Redis has lost it"
        return BatchChanged(f"batch {batch_id} {what}", remedy=remedy, batch_id=batch_id)


def writes_lost(batch_id: str, answer: Enqueued) -> WritesLost:
    """Return the error for a batch whose confirmed requests Redis has lost."""
    remains = f"only {answer.cursor} of its requests queued"
    if answer.answer == "moved":  # `cursor` is a line of the file, otherwise a place in the plan
        remains = f"only its lines up to {answer.cursor}"
    return WritesLost(batch_id, f"batch {batch_id} has {remains}")


def wait_while_full(
    enqueue: Callable[[], Enqueued],
    report: Callable[[str], None],
    stop: threading.Event | None = None,
) -> Enqueued:
    """Call `enqueue` until Redis is not full, or `stop` is set; report the reason of each wait."""
    wait_s = _FIRST_WAIT_S
    stop = stop or threading.Event()
    while (answer := enqueue()).answer == "full":
        report(answer.text)
        if stop.wait(wait_s):
            break
        wait_s = min(wait_s * 2, _LONGEST_WAIT_S)
    return answer
