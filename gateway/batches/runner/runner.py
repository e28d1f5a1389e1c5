"""Claims batches whose time has come, and takes each as far as it goes."""

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
from gateway.batches.runner.turns import Turns, Waiting
from gateway.http.services import Services
from gateway.redis.leases import LeaseLost, Leases
from gateway.settings import LEASE_S
from producer.input.reader import InputUnreadable

log = logging.getLogger(__name__)

#: Batches read or written at a time; what runs in the queue needs no thread.
THREADS = 4
#: Batches looked at in one round trip.
AT_ONCE = 64
#: Between two looks for batches whose time has come, in seconds.
LOOK_S = 0.2
#: A batch is looked at again after so long if something failed.
FAILED_MS = 3000
#: A batch is tried so often, at each stage of its end.
TRIES = 3
#: Batches whose failures are remembered.
_MOST_FAILED = 1000
#: The record of one that has waited longer for its turn is read again.
_STALE_S = 1.0


class BatchRunner:
    """Carries batches until it is stopped. Any number of processes may do it at a time."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._stop = threading.Event()
        self._lease_ms = int(LEASE_S * 1000)
        renew = partial(services.due.renew, lease_ms=self._lease_ms)
        self._leases: Leases[Claim] = Leases(renew, LEASE_S)
        self._turns = Turns(THREADS)
        self._tries: dict[str, int] = {}  # how often this process has failed at a batch
        self._phases = Phases(self._turns.crowded)

    def stop(self) -> None:
        """Have `run` return, once the batches at hand were given back; from any thread."""
        self._stop.set()

    def run(self) -> None:
        """Carry batches until `stop`."""
        away = False
        with ThreadPoolExecutor(THREADS, "warmq-carry") as pool:
            while not self._stop.is_set():
                try:
                    busy = self._look(pool)
                    away = False
                except StoreUnavailable as error:
                    if not away:
                        log.warning(
                            "no batches are carried: %s",
                            error.message,
                            extra={"action": "no_carrying"},
                        )
                    away, busy = True, False
                if not busy:
                    self._stop.wait(LOOK_S)
            for work in self._turns.close():
                self._release(work.held.claim, 0)
                self._leases.drop(work.held)

    def _look(self, pool: ThreadPoolExecutor) -> bool:
        """Take up what is due; return whether there may be more."""
        more = self._claim()
        while (work := self._turns.take()) is not None:
            pool.submit(self._work, work)
        return more

    def _claim(self) -> bool:
        """Have what is due wait for its turn; return whether there may be more."""
        due = self._services.due
        claims = due.claim("batch", self._lease_ms, AT_ONCE)
        if not claims:
            return False
        taken_at = time.monotonic()
        stored = self._services.objects.get_many("batch", [claim.id for claim in claims])
        found = [(c, s, decode(s.document)) for c, s in zip(claims, stored, strict=True) if s]
        runs = self._runs([record for _, _, record in found])
        for claim, was in zip(claims, stored, strict=True):
            if was is None:
                forget_batch(self._services, claim.id)  # deleted, or never written
                due.finish(claim)
        for claim, was, record in found:
            if record.id in runs:
                due.release(claim, wait_ms(self._services, record.created_at))
            elif time.monotonic() - taken_at > LEASE_S / 2:
                due.release(claim, 0)
            elif self._turns.has_room(record.tenant):
                self._turns.add(Waiting(record.tenant, self._leases.hold(claim), was))
            else:
                left_ms = int((record.expires_at - self._services.clock.now()) * 1000)
                again_ms = self._turns.again_ms(record.tenant)
                due.release(claim, min(again_ms, left_ms) if left_ms > 0 else again_ms)
        return len(claims) == AT_ONCE

    def _runs(self, records: Sequence[BatchRecord]) -> set[str]:
        """Return those of which the queue has all lines, some still to end: one round trip."""
        now = self._services.clock.now()
        asked = [r for r in records if r.status == "in_progress" and r.parts and r.expires_at > now]
        ids = [part.batch_id for record in asked for part in record.parts]
        states = dict(zip(ids, self._services.batches.states(ids), strict=True)) if ids else {}
        found = set[str]()
        for record in asked:
            parts = [states[part.batch_id] for part in record.parts]
            if all(p and p.sealed for p in parts) and not all(p and p.finished for p in parts):
                found.add(record.id)
        return found

    def _work(self, work: Waiting | None) -> None:
        """Carry a batch, and what has its turn then."""
        while work is not None:
            try:
                with closing(
                    ClaimedBatch(self._services, work.held, work.stored, self._stop)
                ) as batch:
                    self._carry(batch, work)
            finally:
                self._leases.drop(work.held)
                self._turns.done(work)
            work = self._turns.take()

    def _carry(self, batch: ClaimedBatch, work: Waiting) -> None:
        claim, due = work.held.claim, self._services.due
        trace = read_context(batch.record.traceparent)
        set_log_fields(batch_id=claim.id, trace_id=f"{trace.trace_id:032x}" if trace else "")
        try:
            in_ms = self._take_on(batch, work.since)
            self._tries.pop(claim.id, None)
            if in_ms is None:
                due.finish(claim)
            else:
                due.release(claim, in_ms)
        except LeaseLost:
            self._give_up(claim)
        except WarmqError as error:
            log.warning(
                "batch %s waits: %s", claim.id, error.message, extra={"action": "batch_waits"}
            )
            if isinstance(error, InputUnreadable):
                self._fail(batch, claim, error)
            elif not isinstance(error, StoreUnavailable):  # then its lease ends by itself
                self._release(claim, FAILED_MS)
        except Exception as error:
            log.exception(
                "batch %s cannot be carried now", claim.id, extra={"action": "batch_waits"}
            )
            self._fail(batch, claim, error)

    def _take_on(self, batch: ClaimedBatch, read_at: float) -> int | None:
        """Return in how many ms a batch is to be looked at again; None if it is done with."""
        there = time.monotonic() - read_at < _STALE_S or batch.read_again()
        while there:
            try:
                self._phases.carry(batch)
                return None
            except Later as later:
                return later.in_ms
            except Changed:
                there = batch.read_again()
        return None

    def _fail(self, batch: ClaimedBatch, claim: Claim, error: Exception) -> None:
        """Have a batch tried again, or end."""
        ended = False
        tries = self._tries.pop(claim.id, 0) + 1
        while len(self._tries) >= _MOST_FAILED:
            self._tries.pop(next(iter(self._tries)))
        self._tries[claim.id] = tries
        try:
            with suppress(Changed, LeaseLost, StoreUnavailable):  # it is tried again
                ended = batch.read_again() and _end(batch, error, tries)
        except Exception:
            log.exception("batch %s cannot be ended", claim.id, extra={"action": "batch_waits"})
        if not ended:
            self._release(claim, FAILED_MS)
            return
        self._tries.pop(claim.id, None)
        with suppress(StoreUnavailable):
            self._services.due.finish(claim)

    def _give_up(self, claim: Claim) -> None:
        # If its lease has ended, a renewal that was under way may have come through all the same:
        # then nobody else has it, and it is free now. What another one has stays with that one.
        self._release(claim, 0)
        if not self._stop.is_set():
            log.info(
                "batch %s is given up: its lease was not renewed in time",
                claim.id,
                extra={"action": "batch_given_up"},
            )

    def _release(self, claim: Claim, in_ms: int) -> None:
        with suppress(StoreUnavailable):  # else its lease ends by itself
            self._services.due.release(claim, in_ms)


def _end(batch: ClaimedBatch, error: BaseException, tries: int) -> bool:
    """Bring a batch nearer to its end, after so many tries or at its deadline; return whether there
    is nothing more to do for it.

    One of which nothing is queued fails. What is queued is cancelled first, and its results are
    written; if that fails, too, the batch fails without them.
    """
    record = batch.record
    if tries < TRIES and not batch.late:
        return False
    if record.status in ENDED:  # what is done after its end fails
        return tries >= 3 * TRIES
    told = (
        f"the batch could not be processed: this gateway failed {tries} times "
        f"({type(error).__name__}), its log says at what; send the batch again, or another file"
    )
    problems = record.problems or [BatchError("internal_error", told)]
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
