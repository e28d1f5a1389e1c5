"""What each command does; every function returns the exit status."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import click

from contract import settings as contract_settings
from contract.batch import Batch
from contract.connect import masked
from contract.errors import BatchConflict, StoreUnavailable
from contract.keys import queue_name
from contract.settings import Settings
from contract.store import BatchStore
from producer import progress, show
from producer.deadline import parse_deadline
from producer.listen import listen
from producer.options import Submission, parse_overrides
from producer.progress import Meter, tell
from producer.reader import Input, InputUnreadable, chunks
from producer.results import Collected, Collector, errors_beside, write
from producer.run import Done, Run
from producer.submit import Submitter, Summary

ALL_WELL, SOME_FAILED, BAD_INPUT = 0, 1, 2


def _store(settings: Settings) -> BatchStore:
    url = settings.redis_url.get_secret_value()
    return BatchStore.open(url, "warmq-producer", ttl_ms=settings.result_ttl_ms)


def _open(batch_id: str) -> tuple[BatchStore, Batch]:
    """Return the store and a batch that must exist."""
    settings = contract_settings.load(Settings)
    store = _store(settings)
    batch = store.batch(batch_id)
    if batch is None:
        where = masked(settings.redis_url.get_secret_value())
        raise BatchConflict(
            f"there is no batch {batch_id} (any more) in {where}; see `producer list`"
        )
    return store, batch


@contextlib.contextmanager
def _hint(text: str) -> Iterator[None]:
    """Say how to go on if the work inside is cut short."""
    try:
        yield
    except KeyboardInterrupt:
        tell(f"interrupted; {text}")
        raise
    except (StoreUnavailable, InputUnreadable) as error:
        error.message += f"\n{text}"
        raise


def submit(
    *, file: str, batch_id: str | None, model: str, priority: int, pairs: tuple[str, ...],
    deadline: str | None, wait: bool, output: str | None, errors: str | None, as_json: bool,
) -> int:  # fmt: skip
    """Queue a file; wait and collect if asked to."""
    _check_outputs(output, errors)
    settings = contract_settings.load(Settings)
    name = batch_id or f"batch_{dt.datetime.now(dt.UTC):%Y%m%d%H%M%S}_{secrets.token_hex(8)}"
    queue = queue_name(model or None, settings.queue)
    submission = Submission(
        name, queue, priority, model, parse_overrides(pairs), parse_deadline(deadline)
    )
    submission.check()
    source = Input(file)
    # With `-o -` stdout is for results alone.
    click.echo(f'{{"id":"{name}"}}' if as_json else name, err=output == "-")
    began = time.monotonic()
    with _hint(f"the same command with --batch-id {name} goes on where it stopped"):
        store = _store(settings)
        summary = _submit(store, settings, submission, source)
    tell(_told(summary, time.monotonic() - began))
    if not (summary.batch.finished or store.workers(queue)):
        tell(f"{name}: {progress.standing(store, summary.batch)} yet; the requests wait there")
    status, batch = ALL_WELL, summary.batch
    if wait or output or errors:
        batch = _watch(store, name)
        status = _ended(batch)
    if output or errors:
        _collect(store, batch, "input", output, errors, follow=False)
    if as_json:
        click.echo(show.json_text(batch.as_json()), err=output == "-")
    return BAD_INPUT if summary.batch.number("valid") == 0 else status


def run(
    *, file: str, output: str, errors: str | None, window: int, model: str, priority: int,
    pairs: tuple[str, ...],
) -> int:  # fmt: skip
    """Take a file through the queue in windows."""
    _check_outputs(output, errors)
    if "-" in (output, errors):
        raise click.UsageError("OUT and ERR must be files: a run goes on where they end")
    settings = contract_settings.load(Settings)
    queue = queue_name(model or None, settings.queue)
    submission = Submission("run", queue, priority, model, parse_overrides(pairs))
    submission.check()
    source = Input(file)
    with _hint("the same command goes on where it stopped"), Meter(output) as meter:

        def report(done: Done) -> None:
            text = f"{done.line} lines done, {done.failed} failed"
            meter.update(source.position, text, source.size, at_once=True)

        wide = Run(_store(settings), settings, submission, window, report)
        try:
            done = wide.run(source, Path(output), Path(errors or errors_beside(output)))
        finally:
            source.close()
    tell(f"{output}: {done.completed} results, {done.failed} failed")
    if not done.completed:
        return BAD_INPUT
    return SOME_FAILED if done.failed else ALL_WELL


def _submit(
    store: BatchStore, settings: Settings, submission: Submission, source: Input
) -> Summary:
    with Meter(submission.batch_id, source.size) as meter:
        waited = False

        def report(summary: Summary) -> None:
            nonlocal waited
            text = f"{summary.lines} lines read"
            if summary.waiting:
                text += f", waiting: {summary.waiting}"
            meter.update(source.position, text, at_once=bool(summary.waiting) and not waited)
            waited = bool(summary.waiting)

        submitter = Submitter(store, settings, submission, report)
        try:
            submitter.create(source.name)
            raw_chunks = chunks(source.lines(), submission.seed, settings.max_line_bytes)
            return submitter.run(raw_chunks)
        finally:
            source.close()


def _told(summary: Summary, took_s: float) -> str:
    batch = summary.batch
    valid, rejected = batch.number("valid"), batch.number("total") - batch.number("valid")
    text = f"{batch.id}: {valid} requests queued in {took_s:.1f} s"
    if summary.found and not (summary.queued or summary.rejected):
        text = f"{batch.id}: was submitted already, {valid} requests, {batch.status}"
    elif summary.found:
        text += f", {summary.queued} of them now"
    if rejected:
        text += f", {rejected} bad lines (see `producer results`)"
    if batch.deadline and not batch.finished:
        text += f", deadline {batch.deadline}"
    if summary.without_limit:
        text += (
            f"\n{batch.id}: lines without max_tokens: {summary.without_limit}; they get the "
            "worker's default (WARMQ_DEFAULT_MAX_TOKENS). --set max_tokens=256 gives all yours"
        )
    reason = batch.fields.get("reason")
    if reason:
        text += f"\n{batch.id}: {batch.status}: {reason}"
    elif summary.first_error:
        text += f"\n{batch.id}: first bad line: {summary.first_error}"
    return text


def _watch(store: BatchStore, batch_id: str) -> Batch:
    with _hint(f"the batch goes on; `producer watch {batch_id}` follows it again"):
        return progress.watch(store, batch_id)


def _ended(batch: Batch) -> int:
    """Tell how a batch ended; return the exit status for it."""
    counts = batch.as_json()["request_counts"]
    told = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    tell(f"{batch.id}: {batch.status}, {told or 'no requests'}")
    return ALL_WELL if counts["completed"] == counts["total"] else SOME_FAILED


def status(*, batch_id: str, custom_id: str | None, as_json: bool) -> int:
    """Show a batch or one request."""
    store, batch = _open(batch_id)
    if custom_id is not None:
        state = show.request_state(store, batch, custom_id)
        show.put_json(state) if as_json else show.request_table(state)
    else:
        show.put_json(batch.as_json()) if as_json else show.batch_table(batch)
    return ALL_WELL


def watch(*, batch_id: str, custom_id: str | None, stream: bool, as_json: bool) -> int:
    """Follow a batch, or one request's text, to its end."""
    if stream != (custom_id is not None):
        raise click.UsageError("--stream and --request go together: a text is one request's")
    store, batch = _open(batch_id)
    if custom_id is not None:
        outcome = listen(store, batch, custom_id, show.put_json if as_json else None)
        return ALL_WELL if outcome == "completed" else SOME_FAILED
    batch = _watch(store, batch_id)
    if as_json:
        show.put_json(batch.as_json())
    return _ended(batch)


def list_batches(*, as_json: bool) -> int:
    """Show all batches."""
    batches = _store(contract_settings.load(Settings)).batches()
    if as_json:
        show.put_json([batch.as_json() for batch in batches])
    else:
        show.batch_list(batches)
    return ALL_WELL


def results(
    *, batch_id: str, output: str | None, errors: str | None, order: str, follow: bool,
    partial: bool,
) -> int:  # fmt: skip
    """Collect results into files or stdout."""
    _check_outputs(output, errors)
    store, batch = _open(batch_id)
    if not (batch.finished or follow or partial):
        raise BatchConflict(
            f"batch {batch_id} is still {batch.status}: --follow waits for it, "
            "--partial takes what is there"
        )
    with _hint(f"`producer results {batch_id}` starts again; nothing is lost"):
        collected = _collect(store, batch, order, output, errors, follow=follow)
    return SOME_FAILED if collected.failed else ALL_WELL


def _check_outputs(output: str | None, errors: str | None) -> None:
    if output and errors and os.path.realpath(output) == os.path.realpath(errors):
        raise click.UsageError("--output and --errors name the same file")


def _collect(
    store: BatchStore, batch: Batch, order: str, output: str | None, errors: str | None,
    *, follow: bool,
) -> Collected:  # fmt: skip
    with Meter(batch.id, batch.number("total")) as meter:

        def report(collected: Collected, *, last: bool = False) -> None:
            if last or meter.due():
                done = collected.completed + collected.failed
                meter.update(done, f"{done} results, {collected.failed} failed")

        lines = Collector(store, batch.id, follow=follow).lines(order)
        collected = write(lines, output, errors, report)
        report(collected, last=True)
    where = f", see {collected.errors_file}" if collected.errors_file else ""
    tell(f"{batch.id}: {collected.completed} results, {collected.failed} failed{where}")
    return collected


def cancel(*, batch_id: str, custom_id: str | None, as_json: bool) -> int:
    """Cancel a batch or one request."""
    store, batch = _open(batch_id)
    if custom_id is not None:
        return _changed(batch_id, "cancelled", store.cancel_request(batch, custom_id), as_json)
    with _hint(f"`producer cancel {batch_id}` again ends it"):
        return _changed(batch_id, "cancelled", store.cancel(batch), as_json)


def retry(*, batch_id: str, include: str, as_json: bool) -> int:
    """Queue failed requests again."""
    wanted = [word.strip() for word in include.split(",") if word.strip()]
    if set(wanted) - {"cancelled", "expired"}:
        raise click.UsageError("--include takes cancelled, expired, or both with a comma")
    store, batch = _open(batch_id)
    with _hint(f"`producer retry {batch_id}` again goes on"):
        count = store.retry(batch, ["failed", *wanted])
    return _changed(batch_id, "queued again", count, as_json)


def delete(*, batch_id: str, force: bool, as_json: bool) -> int:
    """Delete a finished batch."""
    store, batch = _open(batch_id)
    if force and not batch.finished:
        store.cancel(batch)
    if not store.delete(batch_id):
        raise BatchConflict(f"batch {batch_id} is still {batch.status}; --force cancels it first")
    tell(f"{batch_id}: deleted")
    if as_json:
        show.put_json({"id": batch_id, "object": "batch", "deleted": True})
    return ALL_WELL


def _changed(batch_id: str, what: str, count: int, as_json: bool) -> int:
    tell(f"{batch_id}: {count} requests {what}")
    if as_json:
        show.put_json({"id": batch_id, "requests": count})
    return ALL_WELL


def dead_list(*, as_json: bool) -> int:
    """Show all dead letters."""
    letters = _store(contract_settings.load(Settings)).dead_letters()
    if as_json:
        show.put_json([show.letter_json(letter, whole=False) for letter in letters])
    else:
        show.letter_list(letters)
    return ALL_WELL


def dead_show(*, letter_id: str) -> int:
    """Show one dead letter with its message."""
    for letter in _store(contract_settings.load(Settings)).dead_letters():
        if letter["id"] == letter_id:
            show.put_json(show.letter_json(letter, whole=True))
            return ALL_WELL
    raise BatchConflict(f"there is no dead letter {letter_id}; see `producer dead list`")


def dead_retry(*, letter_ids: tuple[str, ...], every: bool, as_json: bool) -> int:
    """Queue dead letters again."""
    if every == bool(letter_ids):
        raise click.UsageError("name dead letters by their ID, or give --all")
    store = _store(contract_settings.load(Settings))
    known = [letter["id"] for letter in store.dead_letters()]
    unknown = sorted(set(letter_ids) - set(known))
    if unknown:
        raise BatchConflict(f"there is no dead letter {', '.join(unknown)}")
    count = store.retry_dead(known if every else letter_ids)
    tell(f"{count} dead letters queued again")
    if as_json:
        show.put_json({"requests": count})
    return ALL_WELL
