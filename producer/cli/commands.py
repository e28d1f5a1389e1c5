"""What each command does; every function returns the exit status."""

from __future__ import annotations

import contextlib
import datetime as dt
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import click

from contract import settings as contract_settings
from contract.batch import Batch
from contract.errors import BatchConflict, StoreUnavailable
from contract.redis.batches import BatchStore
from contract.redis.connect import masked
from contract.redis.keys import queue_name
from contract.settings import Settings
from producer.cli import progress, show
from producer.cli.collect import collect
from producer.cli.deadline import parse_deadline
from producer.cli.listen import listen
from producer.cli.progress import Meter, tell
from producer.cli.resume import ResumingSubmit
from producer.core.files import WriteFailed, check_outputs, errors_beside
from producer.core.journal import Done, Journal
from producer.core.reader import Input, InputUnreadable
from producer.core.same_batch import BatchChanged
from producer.core.standing import Standing
from producer.core.submission import Submission, parse_overrides
from producer.core.submit import Summary
from producer.core.windows import Run

ALL_WELL, SOME_FAILED, BAD_INPUT = 0, 1, 2
_WATCH_AGAIN = "the batch goes on; `producer watch {}` follows it again"


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
def _hint(text: str, *, changed: str = "") -> Iterator[None]:
    """Say how to go on if the work inside is cut short; `changed` where a batch was changed."""
    try:
        yield
    except KeyboardInterrupt:
        tell(f"interrupted; {text}")
        raise
    except (StoreUnavailable, InputUnreadable, WriteFailed) as error:
        error.message += f"\n{text}"
        raise
    except BatchChanged as error:
        if not changed:
            raise
        raise BatchChanged(error.happened, changed) from None


def submit(
    *, file: str, batch_id: str | None, model: str, priority: int, pairs: tuple[str, ...],
    deadline: str | None, wait: bool, output: str | None, errors: str | None, as_json: bool,
) -> int:  # fmt: skip
    """Queue a file; wait and collect if asked to."""
    if output or errors:
        check_outputs(output, errors, file)
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
        submitting = ResumingSubmit(store, settings, submission, source)
        summary = submitting.submit()
    tell(_told(summary, time.monotonic() - began))
    if not (summary.batch.finished or store.workers(queue)):
        tell(f"{name}: {Standing(store, queue).text()}; the requests wait there")
    status, batch = ALL_WELL, summary.batch
    if wait or output or errors:
        with _hint(_WATCH_AGAIN.format(name)):
            batch = submitting.watched(batch)
        status = _ended(batch)
    if output or errors:
        with _hint(f"the batch has ended; `producer results {name}` collects it again"):
            collect(store, batch, "input", output, errors)
    if as_json:
        click.echo(show.json_text(batch.as_json()), err=output == "-")
    return BAD_INPUT if summary.batch.number("valid") == 0 else status


def run(
    *, file: str, output: str, errors: str | None, window: int, model: str, priority: int,
    pairs: tuple[str, ...],
) -> int:  # fmt: skip
    """Take a file through the queue in windows."""
    if "-" in (output, errors):
        raise click.UsageError("OUT and ERR must be files: a run goes on where they end")
    check_outputs(output, errors, file, Journal(Path(output)).path)
    settings = contract_settings.load(Settings)
    queue = queue_name(model or None, settings.queue)
    submission = Submission("run", queue, priority, model, parse_overrides(pairs))
    submission.check()
    source = Input(file)
    again = "the same command goes on where it stopped"
    with _hint(again, changed=again), Meter(output) as meter:

        def report(done: Done, waiting: str) -> None:
            text = f"{done.line} lines done, {done.failed} failed"
            if waiting:
                text += f", waiting: {waiting}"
            meter.update(source.position, text, source.size, at_once=not waiting)

        wide = Run(_store(settings), settings, submission, window, report)
        try:
            done = wide.run(source, Path(output), Path(errors or errors_beside(output)))
        finally:
            source.close()
    tell(f"{output}: {done.completed} results, {done.failed} failed")
    if not done.completed:
        return BAD_INPUT
    return SOME_FAILED if done.failed else ALL_WELL


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
    elif as_json:
        show.put_json(batch.as_json())
    else:
        workers = Standing(store, batch.fields.get("queue", "")).text()
        show.batch_table(batch, None if batch.finished else workers)
    return ALL_WELL


def watch(*, batch_id: str, custom_id: str | None, stream: bool, as_json: bool) -> int:
    """Follow a batch, or one request's text, to its end."""
    if stream != (custom_id is not None):
        raise click.UsageError("--stream and --request go together: a text is one request's")
    store, batch = _open(batch_id)
    if custom_id is not None:
        outcome = listen(store, batch, custom_id, show.put_json if as_json else None)
        return ALL_WELL if outcome == "completed" else SOME_FAILED
    with _hint(_WATCH_AGAIN.format(batch_id)):
        batch = progress.watch(store, batch)
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
    check_outputs(output, errors)
    store, batch = _open(batch_id)
    if not (batch.finished or follow or partial):
        raise BatchConflict(
            f"batch {batch_id} is still {batch.status}: --follow waits for it, "
            "--partial takes what is there"
        )
    with _hint(f"`producer results {batch_id}` starts again; nothing is lost"):
        collected = collect(store, batch, order, output, errors, follow=follow, partial=partial)
    return SOME_FAILED if collected.failed else ALL_WELL


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
    if not store.delete(batch_id, force=force):
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
