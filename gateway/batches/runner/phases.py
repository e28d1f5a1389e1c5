"""Runs a batch through its phases: it is validated, queued and finished.

The process may be killed between any two steps, so each phase can be repeated.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import msgspec

from contract.batch import BY_USER, Batch
from contract.errors import BatchConflict
from contract.redis.failures import FailureReads
from gateway.batches.api.record import (
    ENDED,
    BatchError,
    BatchPart,
    BatchRecord,
    RequestCounts,
    Status,
    after_end,
)
from gateway.batches.runner.claimed import ClaimedBatch
from gateway.batches.runner.input_file import InputSummary, validate_input
from gateway.batches.runner.outputs import all_lines, write_files
from gateway.batches.runner.queueing import (
    create_part,
    older_workers_only,
    parts_for,
    submit_part,
    waits_for_worker,
)
from gateway.http.caller import Caller
from gateway.http.errors import ApiError
from gateway.http.limits import estimated_tokens
from gateway.http.services import Services
from gateway.served_models import ServedModels
from producer.batch_watch import BatchChanged, WritesLost
from producer.collect.collect import mark_collected
from producer.input.reader import InputUnreadable
from producer.submit import batch_trace
from producer.submit.expected import least_result_bytes
from producer.submit.submit import Summary

log = logging.getLogger(__name__)
_CHANGED = {"action": "batch_changed"}

#: Seconds that running requests get to end after the completion window.
GRACE_S = 2.0
#: Milliseconds after which a batch that waits for a worker or for memory in Redis is due again.
WAIT_MS = 1000
#: Most cached summaries of files that wait for a worker; other files are read again.
_MOST_SUMMARIES = 100
#: Lines written to the output files between two checks of the lease.
_LINES = 500
#: Seconds that a thread waits for memory in Redis while other batches wait for a thread.
_FULL_S = 5


class Later(Exception):
    """Nothing can be done now: the batch is due again in `in_ms`."""

    def __init__(self, in_ms: int) -> None:
        super().__init__()
        self.in_ms = in_ms


class Phases:
    """Runs batches; `crowded` returns whether batches wait for a thread."""

    def __init__(self, crowded: Callable[[], bool]) -> None:
        self._crowded = crowded
        self._summaries: dict[str, InputSummary] = {}

    def run(self, batch: ClaimedBatch) -> None:
        """Take a batch as far as possible now; return once it is done.

        Raises:
            Later: Run the batch again in `in_ms`.
            Changed: Read the record again.
            LeaseLost: Another process may have the batch.
            StoreUnavailable, FileStoreFailed: Redis or the store does not answer.
        """
        if batch.record.status not in ENDED:
            if not batch.record.parts:
                batch.keep_input()
                self._validate(batch)
            if batch.record.status not in ENDED:
                self._queue_and_finish(batch)
        after_end(batch.services, batch.record)

    def _validate(self, batch: ClaimedBatch) -> None:
        record, services, settings = batch.record, batch.services, batch.services.settings
        if record.status == "cancelling":
            batch.write("cancelled")
            return
        summary = self._summaries.pop(record.id, None) or self._read_input(batch)
        caller = batch.caller()
        # Workers that were alive in the last minute are included: they may be restarting.
        announced = services.batches.announcements()
        served = ServedModels.of(announced, settings.queue, settings.gateway_models)
        asked = (summary.bytes_of, served, caller.models)
        problems = summary.problems or ([] if batch.late else older_workers_only(*asked))
        if problems:
            batch.write("failed", problems=problems)
            return
        if not waits_for_worker(*asked):
            parts = parts_for(record.id, *asked)
        elif batch.late:  # all its lines expire
            parts = [BatchPart(record.id, "", served.base, sorted(summary.bytes_of))]
        else:
            while len(self._summaries) >= _MOST_SUMMARIES:
                self._summaries.pop(next(iter(self._summaries)))
            self._summaries[record.id] = summary
            left_ms = int((record.expires_at - services.clock.now()) * 1000) + 1
            raise Later(max(1, min(WAIT_MS, left_ms)))
        _start(batch, summary, parts, caller)

    def _read_input(self, batch: ClaimedBatch) -> InputSummary:
        settings, record, path = batch.services.settings, batch.record, batch.input()
        if path is None:
            return InputSummary(problems=[_deleted_file(record.input_file_id)])
        most, limit = settings.gateway_max_requests, settings.max_line_bytes
        # The file is read to its end even after the deadline: the error file lists its lines.
        check = partial(batch.check, check_deadline=False)
        summary = validate_input(path, record.endpoint, limit, most, check)
        summary.problems = summary.problems or _too_large(batch.services, summary.requests)
        return summary

    def _queue_and_finish(self, batch: ClaimedBatch) -> None:
        states = _note_deleted(batch)
        must_end = batch.record.status == "cancelling" or batch.late
        if not all(state is not None and state.sealed for state in states):
            self._queue_rest(batch, must_end)
            states = _note_deleted(batch)
            must_end = must_end or bool(batch.record.problems)
        must_end = _note_stopped(batch, states) or must_end
        if not must_end and not _all_ended(states):
            raise Later(wait_ms(batch.services, batch.record.created_at))
        if must_end:
            states = _end_parts(batch, states)
        _finish(batch, states)

    def _queue_rest(self, batch: ClaimedBatch, must_end: bool) -> None:
        """Queue the lines that are not queued yet, unless the batch must end."""
        batch.keep_input()
        path = batch.input()
        if path is None and not batch.record.problems:
            batch.write("cancelling", problems=[_deleted_file(batch.record.input_file_id)])
        elif path is not None and not must_end and not batch.record.problems:
            self._submit(batch, path)

    def _submit(self, batch: ClaimedBatch, path: Path) -> None:
        full_since: float | None = None

        def report(summary: Summary) -> None:
            nonlocal full_since
            batch.check()
            if not summary.waiting:
                full_since = None
                return
            full_since = full_since or time.monotonic()
            if self._crowded() and time.monotonic() - full_since > _FULL_S:
                raise Later(WAIT_MS)

        try:
            if not all(part.made for part in batch.record.parts):
                for part in batch.record.parts:
                    create_part(batch.services, batch.record, part)
                made_parts = [
                    msgspec.structs.replace(part, made=True) for part in batch.record.parts
                ]
                batch.write(parts=made_parts)
            for index in range(len(batch.record.parts)):
                submit_part(batch.services, batch.record, index, path, report, batch.check)
        except InputUnreadable as error:  # the file has changed since it was validated
            batch.write("cancelling", problems=[BatchError("invalid_file", error.message)])
        except WritesLost as error:  # the next call queues what Redis has lost (a failover)
            log.warning("batch %s: %s", batch.record.id, error.message, extra=_CHANGED)
            raise Later(WAIT_MS) from None
        except (BatchConflict, BatchChanged) as error:
            # The queue batch has ended or was deleted: no more lines are queued.
            log.warning("batch %s: %s", batch.record.id, error.message, extra=_CHANGED)
            batch.write("cancelling")


def _start(
    batch: ClaimedBatch, summary: InputSummary, parts: list[BatchPart], caller: Caller
) -> None:
    models = summary.bytes_of
    tokens = {model: estimated_tokens(size) for model, size in models.items()}
    try:
        batch.services.limits.reserve(caller, batch.record.id, tokens)
    except ApiError as error:
        batch.write("failed", problems=[BatchError("token_limit_exceeded", error.message)])
        return
    batch.write(
        "in_progress",
        parts=parts,
        model=next(iter(models)) if len(models) == 1 else "",
        counts=RequestCounts(total=summary.requests),
    )


def _note_deleted(batch: ClaimedBatch) -> list[Batch | None]:
    """Return the queue batches' states; cancel the batch if one of them was deleted.

    A deleted queue batch is not queued again: a user deleted it, or its results expired while no
    gateway ran. To compute them again would cost as much as the first time.
    """
    states, record = _states(batch), batch.record
    gone = [
        part.batch_id
        for part, state in zip(record.parts, states, strict=True)
        if part.made and state is None
    ]
    if gone and not record.problems:
        batch.write("cancelling", problems=[_deleted_parts(gone)])
    return states


def _note_stopped(batch: ClaimedBatch, states: list[Batch | None]) -> bool:
    """Cancel the batch if too many requests of a queue batch failed; return whether they did."""
    stopped = [state.fields["reason"] for state in states if state is not None and state.stopped]
    if stopped and not batch.record.stopped:
        batch.write("cancelling", stopped=stopped[0])
    return bool(stopped)


def _end_parts(batch: ClaimedBatch, states: list[Batch | None]) -> list[Batch | None]:
    """End the queue batches that have not ended.

    Those that were never created are created and ended, so that a process that has lost its lease
    cannot fill them.
    """
    record, store = batch.record, batch.services.batches
    cancelling = record.status == "cancelling"
    if not cancelling and not _all_ended(states):
        left_s = record.expires_at + GRACE_S - batch.services.clock.now()
        if left_s > 0 and all(state is not None and state.sealed for state in states):
            raise Later(int(left_s * 1000) + 1)
    for part, state in zip(record.parts, states, strict=True):
        batch.check_lease()
        if state is None and part.made:
            continue
        part_state = state or create_part(batch.services, record, part, ends=True)
        if not part_state.finished:
            if cancelling:
                store.cancel(part_state, record.stopped or BY_USER)
            else:
                store.expire(part_state)
    return _states(batch)


def _finish(batch: ClaimedBatch, parts: list[Batch | None]) -> None:
    record, services = batch.record, batch.services
    states = [state for state in parts if state is not None]
    deleted = len(states) < len(parts)
    if not _all_ended(list(states)) or (deleted and not record.problems):
        raise Later(100)  # the last requests are ending, or a queue batch was just deleted
    if record.status == "in_progress":
        record = batch.write("finalizing")
    queued = sum(state.number("total") for state in states)
    all_queued = not deleted and 0 < record.counts.total <= queued
    # Lines that were not queued are read from the input file.
    path = None if all_queued else batch.input()
    lines_so_far = count(1)

    def report() -> None:
        if next(lines_so_far) % _LINES == 0:
            batch.check_lease()

    try:
        lines = all_lines(services, record, parts, path, batch.check_lease)
        with batch_trace.export_step(
            "finalise", states[0] if states else None, record.parts[0].queue
        ):
            written = write_files(batch, lines, report)
    except BatchChanged as error:  # retried or deleted
        log.warning("batch %s: %s", record.id, error.message, extra=_CHANGED)
        raise Later(WAIT_MS) from None
    expected_s = max(filter(None, (state.expected_s for state in states)), default=None)
    status = _final_status(record, states, written["counts"].total - queued)
    failures = FailureReads.using(services.batches).first(states)
    cut = sum(state.number("cut") for state in states)
    cached = sum(state.number("cached") for state in states)
    batch.write(
        status, **written, expected_s=expected_s, failures=failures, cut=cut, cached=cached
    )  # fmt: skip
    for state in states:
        mark_collected(services.batches, state)


def wait_ms(services: Services, created_at: int) -> int:
    """Return the ms until a running batch is due again; they grow with the batch's age."""
    return int(min(2000, 250 + 50 * max(0.0, services.clock.now() - created_at)))


def _final_status(record: BatchRecord, states: list[Batch], not_queued: int) -> Status:
    if record.problems:
        return "failed"
    if record.status == "cancelling" or any("cancelling" in state.fields for state in states):
        return "cancelled"
    expired = not_queued or any(state.number("expired") for state in states)
    return "expired" if expired else "completed"


def _all_ended(states: list[Batch | None]) -> bool:
    return all(state is not None and state.finished for state in states)


def _states(batch: ClaimedBatch) -> list[Batch | None]:
    """Return the queue batches' states, None for one that is missing or being deleted."""
    states = batch.services.batches.states([part.batch_id for part in batch.record.parts])
    return [None if state is not None and "deleting" in state.fields else state for state in states]


def _deleted_file(file_id: str) -> BatchError:
    message = f"file {file_id} was deleted before all its lines were queued; upload it again"
    return BatchError("file_not_found", message, "input_file_id")


def _deleted_parts(parts: list[str]) -> BatchError:
    message = (
        f"{', '.join(parts[:5])} {'was' if len(parts) == 1 else 'were'} deleted from the queue, or "
        "the results have expired (WARMQ_RESULT_TTL_S), before the batch's files were written; "
        "warmq does not compute the results again; create the batch again to get them"
    )
    return BatchError("batch_deleted", message)


def _too_large(services: Services, requests: int) -> list[BatchError]:
    """Return the problem of a batch whose results would not fit into an empty Redis."""
    most = services.batches.memory_for_batches(services.settings.high_water)
    if most is None or least_result_bytes(requests) <= most:
        return []
    fit = most // least_result_bytes(1000) * 1000
    message = (
        f"the results of {requests} requests do not fit into Redis, which takes {most} bytes of "
        f"batches; split the file into batches of at most {fit} lines, or give Redis more memory"
    )
    return [BatchError("too_many_tasks", message)]
