"""Claims batches that are due, and runs each one as far as possible.

A batch is due when a gateway has to work on it: its record has changed, or a wait is over.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial

from contract.errors import StoreUnavailable, WarmqError
from contract.log_lines import set_log_fields
from contract.redis.due import Claim
from contract.traces import read_context
from gateway.batches.api.record import ENDED, BatchError, BatchRecord, decode, forget_batch
from gateway.batches.runner.claimed import Changed, ClaimedBatch
from gateway.batches.runner.phases import Later, Phases, wait_ms
from gateway.batches.runner.waiting_batches import WaitingBatch, WaitingBatches
from gateway.http.services import Services
from gateway.redis.leases import LeaseLost, Leases
from gateway.settings import LEASE_S
from producer.input.reader import InputUnreadable

log = logging.getLogger(__name__)

#: Threads that read or write files, each for one batch. A batch in the queue needs no thread.
THREADS = 4
#: Most batches claimed in one call, and seconds between two calls.
AT_ONCE, LOOK_S = 64, 0.2
#: Milliseconds after which a failed batch is due again.
FAILED_MS = 3000
#: Tries of a failing batch before each step that ends it (`_end`).
TRIES = 3
#: Most batches whose failures are counted.
_MOST_FAILED = 1000
#: Seconds after which the record of a waiting batch is read again before the batch runs.
_STALE_S = 1.0


class BatchRunner:
    """Runs batches until it is stopped. Several processes may run batches concurrently."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._stop = threading.Event()
        self._lease_ms = int(LEASE_S * 1000)
        renew = partial(services.due.renew, lease_ms=self._lease_ms)
        self._leases: Leases[Claim] = Leases(renew, LEASE_S)
        self._waiting = WaitingBatches(THREADS)
        self._tries: dict[str, int] = {}  # failures in this process
        self._phases = Phases(self._waiting.crowded)

    def stop(self) -> None:
        """Make `run` release its batches and return; any thread may call this."""
        self._stop.set()

    def run(self) -> None:
        unreachable = False
        with ThreadPoolExecutor(THREADS, "warmq-batch") as pool:
            while not self._stop.is_set():
                busy = False
                try:
                    busy, unreachable = self._claim_and_run(pool), False
                except StoreUnavailable as error:
                    if not unreachable:
                        message = "batches wait for Redis: %s"
                        log.warning(message, error.message, extra={"action": "no_carrying"})
                    unreachable = True
                if not busy:
                    self._stop.wait(LOOK_S)
            for work in self._waiting.close():
                self._release(work.lease.claim, 0)
                self._leases.drop(work.lease)

    def _claim_and_run(self, pool: ThreadPoolExecutor) -> bool:
        """Claim batches and give them threads; return whether more may be due."""
        more = self._claim()
        while (work := self._waiting.take()) is not None:
            pool.submit(self._run_batches, work)
        return more

    def _claim(self) -> bool:
        """Claim due batches, which then wait for threads; return whether more may be due."""
        due = self._services.due
        claims = due.claim("batch", self._lease_ms, AT_ONCE)
        if not claims:
            return False
        claimed_at = time.monotonic()
        documents = self._services.objects.get_many("batch", [claim.id for claim in claims])
        records = [(c, s, decode(s.document)) for c, s in zip(claims, documents, strict=True) if s]
        in_queue = self._in_queue([record for _, _, record in records])
        for claim, stored in zip(claims, documents, strict=True):
            if stored is None:  # deleted, or never written
                forget_batch(self._services, claim.id)
                due.finish(claim)
        for claim, stored, record in records:
            if record.id in in_queue:
                due.release(claim, wait_ms(self._services, record.created_at))
            elif time.monotonic() - claimed_at > LEASE_S / 2:
                due.release(claim, 0)
            elif self._waiting.accepts(record.tenant):
                self._waiting.add(WaitingBatch(record.tenant, self._leases.hold(claim), stored))
            else:
                left_ms = int((record.expires_at - self._services.clock.now()) * 1000)
                again_ms = self._waiting.again_ms(record.tenant)
                due.release(claim, min(again_ms, left_ms) if left_ms > 0 else again_ms)
        return len(claims) == AT_ONCE

    def _in_queue(self, records: Sequence[BatchRecord]) -> set[str]:
        """Return the ids of completely queued batches with requests that have not ended."""
        now = self._services.clock.now()
        asked = [r for r in records if r.status == "in_progress" and r.parts and r.expires_at > now]
        ids = [part.batch_id for record in asked for part in record.parts]
        states = dict(zip(ids, self._services.batches.states(ids), strict=True)) if ids else {}
        in_queue = set[str]()
        for record in asked:
            parts = [states[part.batch_id] for part in record.parts]
            all_run = all(p and p.sealed and not p.stopped for p in parts)
            if all_run and not all(p and p.finished for p in parts):
                in_queue.add(record.id)
        return in_queue

    def _run_batches(self, work: WaitingBatch | None) -> None:
        """Run a batch, then the next ones, in a thread of the pool."""
        while work is not None:
            services, lease = self._services, work.lease
            try:
                with closing(ClaimedBatch(services, lease, work.stored, self._stop)) as batch:
                    self._run_batch(batch, work)
            finally:
                self._leases.drop(lease)
                self._waiting.done(work)
            work = self._waiting.take()

    def _run_batch(self, batch: ClaimedBatch, work: WaitingBatch) -> None:
        claim, due = work.lease.claim, self._services.due
        trace = read_context(batch.record.traceparent)
        set_log_fields(batch_id=claim.id, trace_id=f"{trace.trace_id:032x}" if trace else "")
        waits = {"action": "batch_waits"}
        try:
            in_ms = self._do_phases(batch, work.since)
            self._tries.pop(claim.id, None)
            if in_ms is None:
                due.finish(claim)
            else:
                due.release(claim, in_ms)
        except LeaseLost:
            # If the last renewal succeeded after all, this call releases the batch. If another
            # process has the lease, this call does nothing.
            self._release(claim, 0)
            if not self._stop.is_set():
                message = "batch %s is given up: its lease was not renewed in time"
                log.info(message, claim.id, extra={"action": "batch_given_up"})
        except WarmqError as error:
            log.warning("batch %s waits: %s", claim.id, error.message, extra=waits)
            if isinstance(error, InputUnreadable):
                self._fail(batch, claim, error)
            elif not isinstance(error, StoreUnavailable):  # without Redis the lease expires
                self._release(claim, FAILED_MS)
        except Exception as error:
            log.exception("batch %s failed; it is tried again", claim.id, extra=waits)
            self._fail(batch, claim, error)

    def _do_phases(self, batch: ClaimedBatch, read_at: float) -> int | None:
        """Run a batch; return the ms until it is due again, None if done."""
        exists = time.monotonic() - read_at < _STALE_S or batch.read_again()
        while exists:
            try:
                self._phases.run(batch)
                return None
            except Later as later:
                return later.in_ms
            except Changed:
                exists = batch.read_again()
        return None

    def _fail(self, batch: ClaimedBatch, claim: Claim, error: Exception) -> None:
        """Count a failure; try the batch again, or end it after several failures."""
        ended = False
        tries = self._tries.pop(claim.id, 0) + 1
        while len(self._tries) >= _MOST_FAILED:
            self._tries.pop(next(iter(self._tries)))
        self._tries[claim.id] = tries
        try:
            with suppress(Changed, LeaseLost, StoreUnavailable):  # the batch is tried again
                ended = batch.read_again() and _end(batch, error, tries)
        except Exception:
            waits = {"action": "batch_waits"}
            log.exception("batch %s cannot be ended", claim.id, extra=waits)
        if not ended:
            self._release(claim, FAILED_MS)
            return
        self._tries.pop(claim.id, None)
        with suppress(StoreUnavailable):
            self._services.due.finish(claim)

    def _release(self, claim: Claim, in_ms: int) -> None:
        with suppress(StoreUnavailable):  # without Redis the lease expires
            self._services.due.release(claim, in_ms)


def _end(batch: ClaimedBatch, error: Exception, tries: int) -> bool:
    """Take the next step to end a failing batch; return whether nothing is left to do.

    If nothing was queued, the batch gets the status `failed`. Otherwise it is cancelled first, and
    its results are written; if that fails too, it gets the status `failed` without results.
    """
    record = batch.record
    if tries < TRIES and not batch.late:
        return False
    if record.status in ENDED:  # a step after its end fails
        return tries >= 3 * TRIES
    message = (
        f"the batch could not be processed: this gateway failed {tries} times "
        f"({type(error).__name__}), see its log; send the batch again, or another file"
    )
    problems = record.problems or [BatchError("internal_error", message)]
    if not record.parts:
        batch.write("cancelled" if record.status == "cancelling" else "failed", problems=problems)
    elif tries < 2 * TRIES and record.status == "in_progress":
        batch.write("cancelling", problems=problems)
    elif tries >= 2 * TRIES:
        store = batch.services.batches
        for state in store.states([part.batch_id for part in record.parts]):
            if state is not None and not state.finished:
                store.cancel(state)
        batch.write("failed", problems=problems)
    return False
