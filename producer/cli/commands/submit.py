"""Implements `producer submit`, which queues a file as one batch."""

import shlex
import sys
import time
from typing import Any

import click

from contract.batch import Batch
from contract.webhooks import is_private, private_text
from producer.cli import options, progress, show
from producer.cli.collect import check_outputs, check_replaced, collect
from producer.cli.context import WATCH_AGAIN, Context, Exit, hint, open_input, pass_context
from producer.cli.options import parse_deadline
from producer.cli.progress import Meter, tell
from producer.cli.submitting import (
    check_workers,
    make_submission,
    queued_text,
    submission_options,
)
from producer.input.files import OutputUnwritable
from producer.input.source import Source
from producer.queue_workers import QueueWorkers, unserved_text
from producer.stalls import StallReads
from producer.submit.resumable import ResumableSubmit
from producer.submit.submission import OrderOption, new_batch_id
from producer.submit.submit import Summary


@click.command("submit", cls=options.TakesReuse)
@click.argument("file", metavar="FILE")
@click.option("--batch-id", metavar="ID", help="Id of the batch. The same id resumes it.")
@options.mapped
@submission_options
@click.option(
    "--deadline",
    metavar="D",
    help="When unfinished requests expire: 90s, 2h, 3d from the batch's creation, or a "
    "time with its time zone, for example 2026-11-21T08:00:00+01:00.",
)
@click.option(
    "--notify",
    metavar="URL",
    default="",
    help="Let a worker POST a signed webhook to this URL when the batch ends.",
)
@click.option("--wait", is_flag=True, help="Follow the batch to its end; -o or --errors imply it.")
@options.output
@options.errors
@options.force
@options.wait_redis
@options.as_json
@pass_context
def command(
    context: Context,
    /,
    *,
    file: str,
    batch_id: str | None,
    mapped: tuple[str, ...],
    deadline: str | None,
    notify: str,
    wait: bool,
    output: str | None,
    errors: str | None,
    force: bool,
    wait_redis: float,
    as_json: bool,
    **values: Any,
) -> Exit:
    """Queue every line of FILE as one batch.

    FILE has JSON lines, and may be compressed (.gz, .zst); `-` is standard input. A line is an
    OpenAI batch line or has the short form {"prompt": ...} or {"messages": ...}. FILE may also
    be a table (.parquet, .arrow, .csv) or the folder of a data set; see --map and --keep. OUT may
    be a table of all rows (.parquet, .csv). FILE and OUT may be in a bucket (s3://, gs://, az://),
    FILE also at https://.

    The batch id is printed before the first line is read. A bad line becomes an error result;
    the other lines run. After an interruption, the same command with the printed --batch-id
    continues; no request runs twice. If Redis loses its last writes meanwhile (a failover),
    this command queues the lost requests again.

    With --json, {"id": ...} is printed first, and the batch's state at the end.
    """
    name, deadline_text = batch_id or new_batch_id(), parse_deadline(deadline)
    submission = make_submission(context.settings, name, values, deadline_text, notify)
    follows = wait or bool(output or errors)
    context.wait_for_redis(wait_redis if follows else 0)
    _check_files(context, batch_id or "", file, output, errors, force)
    source = open_input(file, mapped, submission.overrides, submission.keep, values["delimiter"])
    _check_order(submission.order, source)
    if deadline_text:
        submission.check_deadline(context.store)
    _print_id(f'{{"id":"{name}"}}' if as_json else name, err=output == "-")
    submitting = MeteredSubmit(context.store, context.settings, submission, source)
    status, batch = _submit(submitting, follows=follows)
    if follows:
        status, batch = _follow(submitting, batch, output, errors, force)
    if as_json:
        show.put_json(show.batch_json(batch), err=output == "-")
    return Exit.BAD_INPUT if batch.number("valid") == 0 else status


def _check_files(
    context: Context,
    /,
    batch_id: str,
    file: str,
    output: str | None,
    errors: str | None,
    force: bool,
) -> None:
    """Raise OutputUnwritable if the files cannot be written, or must not be replaced."""
    if not (output or errors):
        return
    check_outputs(output, errors, file, force=force)
    if not force:
        batch = context.store.batch(batch_id) if batch_id else None
        check_replaced(output, errors, batch_id, batch.written if batch else ())


def _check_order(order: OrderOption, source: Source) -> None:
    """Raise UsageError for `--order prefix` and a pipe; print that `auto` keeps a pipe's order."""
    if order == "input" or source.repeatable:
        return
    why = f"{source.name} is a pipe, and an order is planned from the whole file"
    if order == "prefix":
        raise click.UsageError(
            f"--order prefix: {why}; save it as a file and submit that, or leave --order out"
        )
    tell(f"order: input; {why}")


def _print_id(text: str, *, err: bool) -> None:
    """Print the batch id, which resuming needs; with `err` to stderr, as stdout has results."""
    try:
        if (sys.stderr if err else sys.stdout) is None:  # closed from the start; click ignores this
            raise BrokenPipeError
        click.echo(text, err=err)
    except BrokenPipeError:
        stream = "standard error" if err else "standard output"
        raise OutputUnwritable(
            f"nothing was queued: {stream} is closed, and the batch id goes there"
        ) from None


def _submit(submitting: "MeteredSubmit", *, follows: bool) -> tuple[Exit, Batch]:
    """Queue the file; print a summary, and a notice if no worker serves the queue."""
    store, began = submitting.store, time.monotonic()
    name = submitting.submission.batch_id
    submitting.submission = check_workers(store, submitting.settings, submitting.submission)
    again = f"the same command with --batch-id {name}"
    fix_input = f"fix the file; {again} queues the missing lines; or `producer cancel {name}`"
    goes_on = f"{again} goes on where it stopped; `producer cancel {name}` ends it"
    with hint(goes_on, fix_input=fix_input):
        summary = submitting.submit()
    reuse = submitting.submission.reuse_s is not None
    tell(queued_text(summary, time.monotonic() - began, reuse=reuse))
    if summary.batch.stopped and not follows:
        show.tell_way_on(summary.batch)
    if url := submitting.submission.notify:
        signed = "signed with the secret that `producer webhooks secret` prints"
        tell(f"{name}: a worker posts to {url} at the batch's end, {signed}")
        if is_private(url):
            tell(f"{name}: {private_text('workers')}")
    for queue in () if summary.batch.finished else summary.batch.queues:
        if not store.workers(queue):
            text, base = "", submitting.settings.queue
            if summary.batch.routes and queue == base:  # of the lines without a model
                text = unserved_text(store, base, "")
            text = text or QueueWorkers(store, queue).text()
            tell(f"{name}: {text}; the requests wait there")
    if "deadline" in summary.batch.fields and not summary.batch.finished:
        names = {name: name}
        for stall in StallReads.using(store).late_batches(summary.batch.queues, names):
            tell(f"{stall.sentence()}: {stall.advice()}")
    return Exit.SOME_FAILED if summary.batch.stopped else Exit.ALL_WELL, summary.batch


def _follow(
    submitting: "MeteredSubmit",
    batch: Batch,
    output: str | None,
    errors: str | None,
    force: bool,
) -> tuple[Exit, Batch]:
    """Follow the batch to its end, and collect its results if `output` or `errors` is given."""
    later, collecting = WATCH_AGAIN.format(batch.id), ""
    if output or errors:
        places = [*(["-o", output] if output else []), *(["--errors", errors] if errors else [])]
        collecting = shlex.join(["producer", "results", batch.id, *places])
        later = (
            f"the batch goes on; `{collecting} --follow` waits for its end and collects it, "
            f"`producer cancel {batch.id}` ends it"
        )
    with hint(later):
        batch = submitting.watch_batch(batch)
    status = show.print_end(batch)
    if output or errors:
        with hint(f"the batch has ended; `{collecting}` collects it again"):
            collect(submitting.store, batch, "input", output, errors, force=force)
    show.tell_cut(batch)
    return status, batch


class MeteredSubmit(ResumableSubmit):
    """Submits one source with a meter, and prints when Redis has lost writes."""

    _meter: Meter
    #: Whether the last report was about waiting for Redis.
    _waited = False

    def watch_batch(self, batch: Batch) -> Batch:
        """Follow the submitted batch to its end (`follow`), and show its progress."""
        return self.follow(batch, lambda batch: progress.watch(self.store, batch, may_reopen=False))

    def _notify(self, text: str) -> None:
        tell(text)

    def _report(self, summary: Summary) -> None:
        text = f"{summary.lines} lines read"
        if summary.pushed:
            text += f", {summary.pushed} of the requests queued"
        if summary.waiting:
            text += f", waiting: {summary.waiting}"
        begins_to_wait = bool(summary.waiting) and not self._waited
        self._meter.update(self.source.position, text, force=begins_to_wait)
        self._waited = bool(summary.waiting)

    def _submit_once(self) -> Summary:
        self._waited = False
        with Meter(self.submission.batch_id, self.source.size) as self._meter:
            return super()._submit_once()
