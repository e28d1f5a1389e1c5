"""The phases of a batch. Each can be repeated; between any two the process may be killed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import msgspec

from contract.batch import Batch
from contract.errors import BatchConflict
from gateway.batches.api.record import (
    ENDED,
    BatchError,
    BatchPart,
    BatchRecord,
    RequestCounts,
    Status,
)
from gateway.batches.runner.after import after_end
from gateway.batches.runner.claimed import ClaimedBatch
from gateway.batches.runner.input_file import InputSummary, validate_input
from gateway.batches.runner.outputs import all_lines, write_files
from gateway.batches.runner.queueing import (
    create_part,
    outdated,
    parts_for,
    submit_part,
    waits,
)
from gateway.http.caller import Caller
from gateway.http.errors import ApiError
from gateway.http.limits import estimated_tokens
from gateway.http.services import Services
from gateway.served_models import ServedModels
from producer.batch_watch import BatchChanged
from producer.collect.collect import mark_collected
from producer.input.reader import InputUnreadable
from producer.submit import batch_trace
from producer.submit.expected import least_result_bytes
from producer.submit.submit import Summary

log = logging.getLogger(__name__)
_CHANGED = {"action": "batch_changed"}

#: What runs at the end of the window has so long to end by itself.
GRACE_S = 2.0
#: A batch that waits for a worker, or for room in Redis, is looked at again after so long.
WAIT_MS = 1000
#: Validated files that wait for a worker; others are read again.
_MOST_LOOKED = 100
#: Lines between two looks whether to go on with writing.
_LINES = 500


class Later(Exception):
    """Nothing can be done now: look again in `in_ms`."""

    def __init__(self, in_ms: int) -> None:
        super().__init__()
        self.in_ms = in_ms


class Phases:
    """Takes batches on; one at a time in each thread."""

    def __init__(self, crowded: Callable[[], bool]) -> None:
        """Prepare; `crowded` says whether other batches wait for this thread."""
        self._crowded = crowded
        self._looked: dict[str, InputSummary] = {}

    def carry(self, batch: ClaimedBatch) -> None:
        """Do what can be done now, to the end if possible.

        Raises:
            Later: it is to be looked at again; else it is done with.
            Changed: read it again, at once.
            LeaseLost: another one has it.
            StoreUnavailable, FileStoreFailed: Redis, or the files' store, does not answer.
        """
        if batch.record.status not in ENDED:
            if not batch.record.parts:
                batch.keep_input()
                self._validate(batch)
            if batch.record.status not in ENDED:
                self._run(batch)
        after_end(batch.services, batch.record)

    # -- looking through ----------------------------------------------------------------

    def _validate(self, batch: ClaimedBatch) -> None:
        record, services, settings = batch.record, batch.services, batch.services.settings
        if record.status == "cancelling":
            batch.write("cancelled")
            return
        looked, caller = self._looked.pop(record.id, None) or self._look(batch), batch.caller()
        # A worker that was heard within the last minute counts: it may be starting again.
        announced = services.batches.announcements()
        served = ServedModels.of(announced, settings.queue, settings.gateway_models)
        asked = (looked.bytes_of, served, caller.models)
        problems = looked.problems or ([] if batch.late else outdated(*asked))
        if problems:
            batch.write("failed", problems=problems)
            return
        if not waits(*asked):
            parts = parts_for(record.id, *asked)
        elif batch.late:  # its time is over: all its lines expire
            parts = [BatchPart(record.id, "", served.base, sorted(looked.bytes_of))]
        else:
            while len(self._looked) >= _MOST_LOOKED:
                self._looked.pop(next(iter(self._looked)))
            self._looked[record.id] = looked
            left_ms = int((record.expires_at - services.clock.now()) * 1000) + 1
            raise Later(max(1, min(WAIT_MS, left_ms)))
        self._start(batch, looked, parts, caller)

    def _look(self, batch: ClaimedBatch) -> InputSummary:
        settings, record, path = batch.services.settings, batch.record, batch.input()
        if path is None:
            return InputSummary(problems=[_no_file(record.input_file_id)])
        most, limit = settings.gateway_max_requests, settings.max_line_bytes
        on = partial(batch.go_on, ends_late=False)
        looked = validate_input(path, record.endpoint, limit, most, on)
        looked.problems = looked.problems or _no_room(batch.services, looked.requests)
        return looked

    def _start(
        self, batch: ClaimedBatch, looked: InputSummary, parts: list[BatchPart], caller: Caller
    ) -> None:
        models = looked.bytes_of
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
            counts=RequestCounts(total=looked.requests),
        )

    # -- running ----------------------------------------------------------------------------

    def _run(self, batch: ClaimedBatch) -> None:
        states = self._note_deleted(batch)
        ending = batch.record.status == "cancelling" or batch.late
        if not all(state is not None and state.sealed for state in states):
            self._queue_rest(batch, ending)
            states = self._note_deleted(batch)
            ending = ending or bool(batch.record.problems)
        if not ending and not _ended(states):
            raise Later(wait_ms(batch.services, batch.record.created_at))
        if ending:
            states = self._end_parts(batch, states)
        self._finish(batch, states)

    def _note_deleted(self, batch: ClaimedBatch) -> list[Batch | None]:
        """Return the parts' states; of parts that were there and are gone, the batch is told.

        They are not queued again: who has deleted them does not want them, and results whose life
        has ended while no gateway ran were paid for.
        """
        states, record = _states(batch), batch.record
        gone = [
            part.batch_id
            for part, state in zip(record.parts, states, strict=True)
            if part.made and state is None
        ]
        if gone and not record.problems:
            batch.write("cancelling", problems=[_was_deleted(gone)])
        return states

    def _queue_rest(self, batch: ClaimedBatch, ending: bool) -> None:
        """Queue what is not queued yet, unless the batch is to end."""
        batch.keep_input()
        path = batch.input()
        if path is None and not batch.record.problems:
            batch.write("cancelling", problems=[_no_file(batch.record.input_file_id)])
        elif path is not None and not ending and not batch.record.problems:
            self._submit(batch, path)

    def _submit(self, batch: ClaimedBatch, path: Path) -> None:
        full_since: list[float] = []

        def report(summary: Summary) -> None:
            batch.go_on()
            if not summary.waiting:
                full_since.clear()
                return
            full_since.append(time.monotonic())
            if self._crowded() and full_since[-1] - full_since[0] > 5:
                raise Later(WAIT_MS)

        try:
            if not all(part.made for part in batch.record.parts):
                for part in batch.record.parts:
                    create_part(batch.services, batch.record, part)
                made = [msgspec.structs.replace(part, made=True) for part in batch.record.parts]
                batch.write(parts=made)
            for at in range(len(batch.record.parts)):
                submit_part(batch.services, batch.record, at, path, report, batch.go_on)
        except InputUnreadable as error:  # it has changed since it was looked through
            batch.write("cancelling", problems=[BatchError("invalid_file", error.message)])
        except (BatchConflict, BatchChanged) as error:
            # Somebody has ended or deleted it in the queue: what is there is what there will be.
            log.warning("batch %s: %s", batch.record.id, error.message, extra=_CHANGED)
            batch.write("cancelling")

    def _end_parts(self, batch: ClaimedBatch, states: list[Batch | None]) -> list[Batch | None]:
        """End what has not ended, with or without a worker; parts that never were there are made,
        so that nobody who was given up can fill them later."""
        record, store = batch.record, batch.services.batches
        cancelling = record.status == "cancelling"
        if not cancelling and not _ended(states):
            since = record.expires_at + GRACE_S - batch.services.clock.now()
            if since > 0 and all(state is not None and state.sealed for state in states):
                raise Later(int(since * 1000) + 1)
        for part, state in zip(record.parts, states, strict=True):
            batch.check()
            if state is None and part.made:
                continue
            there = state or create_part(batch.services, record, part, ends=True)
            if not there.finished:
                (store.cancel if cancelling else store.expire)(there)
        return _states(batch)

    # -- ending -------------------------------------------------------------------------------

    def _finish(self, batch: ClaimedBatch, there: list[Batch | None]) -> None:
        record, services = batch.record, batch.services
        states = [state for state in there if state is not None]
        deleted = len(states) < len(there)
        if not _ended(list(states)) or (deleted and not record.problems):
            raise Later(100)  # the last ends are on their way, or a part was just deleted
        if record.status == "in_progress":
            record = batch.write("finalizing")
        queued = sum(state.number("total") for state in states)
        all_queued = not deleted and 0 < record.counts.total <= queued
        path = None if all_queued else batch.input()  # there are the lines that were not
        lines_so_far = count(1)

        def report() -> None:
            if next(lines_so_far) % _LINES == 0:
                batch.check()

        try:
            lines = all_lines(services, record, there, path, batch.check)
            with batch_trace.step("finalise", states[0] if states else None, record.parts[0].queue):
                written = write_files(batch, lines, report)
        except BatchChanged as error:  # it was retried or deleted
            log.warning("batch %s: %s", record.id, error.message, extra=_CHANGED)
            raise Later(WAIT_MS) from None
        batch.write(
            _end_of(record, states, written.counts.total - queued),
            output_file_id=written.output_file_id,
            error_file_id=written.error_file_id,
            counts=written.counts,
            usage=written.usage,
            expected_s=max(filter(None, (state.expected_s for state in states)), default=None),
        )
        for state in states:
            mark_collected(services.batches, state)


def wait_ms(services: Services, created_at: int) -> int:
    """Return after how long a batch that runs is looked at again: the older, the later."""
    return int(min(2000, 250 + 50 * max(0.0, services.clock.now() - created_at)))


def _end_of(record: BatchRecord, states: list[Batch], not_queued: int) -> Status:
    if record.problems:
        return "failed"
    if record.status == "cancelling" or any("cancelling" in state.fields for state in states):
        return "cancelled"
    expired = not_queued or any(state.number("expired") for state in states)
    return "expired" if expired else "completed"


def _ended(states: list[Batch | None]) -> bool:
    return all(state is not None and state.finished for state in states)


def _states(batch: ClaimedBatch) -> list[Batch | None]:
    """Return the states of the parts, None for one that is not there, or is being deleted."""
    states = batch.services.batches.states([part.batch_id for part in batch.record.parts])
    return [None if state is not None and "deleting" in state.fields else state for state in states]


def _no_file(file_id: str) -> BatchError:
    """Return the problem of a batch whose input file was deleted too early."""
    told = f"file {file_id} was deleted before all its lines were queued; upload it again"
    return BatchError("file_not_found", told, "input_file_id")


def _was_deleted(parts: list[str]) -> BatchError:
    """Return the problem of a batch some of whose parts were in the queue and are gone."""
    told = (
        f"{', '.join(parts[:5])} {'was' if len(parts) == 1 else 'were'} deleted from the queue, or "
        "the life of the results has ended (WARMQ_RESULT_TTL_S), before the batch's files were "
        "written; nothing is computed again: create the batch anew if its results are wanted"
    )
    return BatchError("batch_deleted", told)


def _no_room(services: Services, requests: int) -> list[BatchError]:
    """Return what is wrong with so many requests: their results cannot all be in Redis, where they
    are until the batch ends, not even if nothing else is there."""
    most = services.batches.memory_for_batches(services.settings.high_water)
    if most is None or least_result_bytes(requests) <= most:
        return []
    fit = most // least_result_bytes(1000) * 1000
    told = (
        f"the results of {requests} requests do not fit into Redis, which takes {most} bytes of "
        f"batches; split the file into batches of at most {fit} lines, or give Redis more memory"
    )
    return [BatchError("too_many_tasks", told)]
