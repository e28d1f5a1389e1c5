"""Brings the lines of a batch into the queue, as `producer submit` does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from contract.batch import Batch
from contract.errors import BatchConflict
from gateway.batches.api.record import BatchRecord, Part
from gateway.batches.runner.routing import Sharing
from gateway.http.services import Services
from producer.input.reader import Input, chunks
from producer.input.unpacking import Watch
from producer.submit.submission import Submission
from producer.submit.submit import Submitter
from producer.submit.summary import Summary


def submission_of(record: BatchRecord, part: Part) -> Submission:
    """Return what shapes the messages of a part: the record and nothing else."""
    return Submission(
        part.batch_id,
        part.queue,
        record.priority,
        part.model,
        deadline=str(record.expires_at * 1000),
        tenant=record.tenant,
        once=record.once,
        order=record.order,
        asked_by=record.traceparent,
    )


def create_part(
    services: Services, record: BatchRecord, part: Part, *, ends: bool = False
) -> Batch:
    """Make a part's batch of the queue, or find it; one that `ends` is made for that alone."""
    planned = record.order != "input"
    return submission_of(record, part).create(
        services.batches, record.input_file_id, planned=planned, ends=ends
    )


def submit_part(
    services: Services, record: BatchRecord, at: int, path: Path,
    report: Callable[[Summary], None], watch: Watch | None = None,
) -> None:  # fmt: skip
    """Queue what is not queued yet of a part, and seal it; `watch` may raise to end that.

    Raises:
        BatchConflict: the part was ended or deleted meanwhile.
        InputUnreadable: the file is damaged.
        StoreUnavailable: Redis does not answer; it goes on where it was.
    """
    part, settings = record.parts[at], services.settings
    sharing, submission = Sharing(record.parts, at), submission_of(record, part)
    batch = services.batches.batch(part.batch_id) if part.made else None
    if part.made and batch is None:
        raise BatchConflict(f"batch {part.batch_id} was deleted meanwhile")
    batch = batch or create_part(services, record, part)
    if batch.sealed:
        return
    check = None if part.all_served and not part.named else sharing.check
    # What has parts was looked through: no custom_id is there twice.
    submitter = Submitter(services.batches, settings, submission, batch, report, check, unique=True)
    with closing(Input(str(path), watch=watch)) as source:
        raw = chunks(source.lines(), submission.seed, settings.max_line_bytes)
        submitter.run(sharing.chunks(raw))
