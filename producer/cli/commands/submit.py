"""`producer submit`."""

import shlex
import sys
import time
from typing import Any

import click

from contract.batch import Batch
from producer.cli import options, progress, show
from producer.cli.collect import check_outputs, check_replaced, collect
from producer.cli.context import WATCH_AGAIN, Context, Exit, hint, open_input, pass_context
from producer.cli.options import parse_deadline
from producer.cli.progress import Meter, tell
from producer.cli.submitting import make_submission, queued, shaping_options, tell_if_unserved
from producer.input.files import OutputUnwritable
from producer.input.source import Source
from producer.queue_workers import QueueWorkers, refuse_older_workers
from producer.submit.submission import OrderOption, new_batch_id
from producer.submit.submit import ResumableSubmit, Summary


@click.command("submit")
@click.argument("file", metavar="FILE")
@click.option("--batch-id", metavar="ID", help="Name of the batch. The same name resumes it.")
@options.mapped
@shaping_options
@click.option(
    "--deadline",
    metavar="D",
    help="When unfinished requests expire: 90s, 2h, 3d from the batch's creation, or a "
    "time with its zone, as 2026-11-21T08:00:00+01:00.",
)
@click.option("--wait", is_flag=True, help="Follow the batch to its end (-o and --errors do too).")
@options.output
@options.errors
@options.force
@options.as_json
@pass_context
def command(
    context: Context,
    *,
    file: str,
    batch_id: str | None,
    mapped: tuple[str, ...],
    shaping: dict[str, Any],
    deadline: str | None,
    wait: bool,
    output: str | None,
    errors: str | None,
    force: bool,
    as_json: bool,
) -> Exit:
    """Queue every line of FILE as one batch.

    FILE is JSON lines, also as .gz or .zst; `-` is standard input. A line is an
    OpenAI batch line or the short form {"prompt": ...} or {"messages": ...}. Or it
    is a table (.parquet, .arrow, .csv) or a data set's folder, with --map. OUT may be
    .parquet. Both may be in a bucket: s3://, gs://, az://, https:// for FILE.

    The batch id is printed before the first line is read. A bad line becomes an
    error result, the others run. After an interruption the same command with the
    printed --batch-id goes on where it stopped; no request runs twice. Where Redis
    loses its last writes meanwhile (a failover), this queues them again by itself.

    With --json: {"id"} at once, and the batch's state at the end.
    """
    name = batch_id or new_batch_id()
    until = parse_deadline(deadline)
    submission = make_submission(context.settings, name, shaping, until)
    if output or errors:
        _check_outputs(context, output, errors, file, batch_id, force)
    source = open_input(file, mapped, submission.overrides)
    _tell_if_unplanned(submission.order, source)
    if until:
        submission.check_deadline(context.store)
    _put_id(f'{{"id":"{name}"}}' if as_json else name, err=output == "-")
    submitting = ResumingSubmit(context.store, context.settings, submission, source)
    status, batch = Exit.ALL_WELL, _queued(submitting).batch
    if wait or output or errors:
        status, batch = _followed(submitting, batch, output, errors, force)
    if as_json:
        show.put_json(show.batch_json(batch), err=output == "-")
    return Exit.BAD_INPUT if batch.number("valid") == 0 else status


def _check_outputs(
    context: Context,
    output: str | None,
    errors: str | None,
    file: str,
    batch_id: str | None,
    force: bool,
) -> None:
    """Refuse to write over what is no earlier collection of this batch, unless forced."""
    check_outputs(output, errors, file, forced=force)
    if not force:
        batch = context.store.batch(batch_id) if batch_id else None
        check_replaced(output, errors, batch_id or "", batch.written if batch else ())


def _tell_if_unplanned(order: OrderOption, source: Source) -> None:
    """Say that a pipe's lines are queued as they come; refuse to promise another order."""
    if order == "input" or source.repeatable:
        return
    why = f"{source.name} is a pipe, and an order is planned from the whole file"
    if order == "prefix":
        raise click.UsageError(
            f"--order prefix: {why}; save it as a file and submit that, or leave --order out"
        )
    tell(f"order: input; {why}")


def _put_id(text: str, *, err: bool) -> None:
    """Print the batch id, without which nobody could go on; with `err`, as for `-o -`, not on
    stdout, which is for results alone then."""
    try:
        if (sys.stderr if err else sys.stdout) is None:  # closed from the start: click says nothing
            raise BrokenPipeError
        click.echo(text, err=err)
    except BrokenPipeError:
        stream = "standard error" if err else "standard output"
        raise OutputUnwritable(
            f"nothing was queued: {stream} is closed, and the batch id goes there"
        ) from None


def _queued(submitting: "ResumingSubmit") -> Summary:
    """Queue the file, and say what became of it and who will serve it."""
    store, began = submitting.store, time.monotonic()
    name, queue = submitting.submission.batch_id, submitting.submission.queue
    refuse_older_workers(store, queue)
    tell_if_unserved(store, submitting.settings.queue, submitting.submission.model)
    again = f"the same command with --batch-id {name}"
    mended = (
        f"mend the file, and {again} queues what batch {name} does not have yet; "
        f"or `producer cancel {name}`"
    )
    with hint(f"{again} goes on where it stopped", mended=mended):
        summary = submitting.submit()
    tell(queued(summary, time.monotonic() - began))
    if not (summary.batch.finished or store.workers(queue)):
        tell(f"{name}: {QueueWorkers(store, queue).text()}; the requests wait there")
    return summary


def _followed(
    submitting: "ResumingSubmit",
    batch: Batch,
    output: str | None,
    errors: str | None,
    force: bool,
) -> tuple[Exit, Batch]:
    """Follow the batch to its end, and collect its results if they have a place."""
    later, collected = WATCH_AGAIN.format(batch.id), ""
    if output or errors:
        places = [("-o", output), ("--errors", errors)]
        words = [
            "producer",
            "results",
            batch.id,
            *(w for place in places if place[1] for w in place),
        ]
        collected = shlex.join(map(str, words))
        later = f"the batch goes on; `{collected} --follow` waits for its end and collects it"
    with hint(later):
        batch = submitting.watched(batch)
    status = show.ended(batch)
    if output or errors:
        with hint(f"the batch has ended; `{collected}` collects it again"):
            collect(submitting.store, batch, "input", output, errors, forced=force)
    return status, batch


class ResumingSubmit(ResumableSubmit):
    """Submits one source with a meter, and says what it does where Redis has lost writes."""

    _meter: Meter
    _waited = False

    def watched(self, batch: Batch) -> Batch:
        """Follow the submitted batch to its end, showing how far it is."""
        return self.follow(batch, lambda batch: progress.watch(self.store, batch, may_reopen=False))

    def _notify(self, text: str) -> None:
        tell(text)

    def _report(self, summary: Summary) -> None:
        text = f"{summary.lines} lines read"
        if summary.pushed:
            text += f", {summary.pushed} of the requests queued"
        if summary.waiting:
            text += f", waiting: {summary.waiting}"
        at_once = bool(summary.waiting) and not self._waited
        self._meter.update(self.source.position, text, at_once=at_once)
        self._waited = bool(summary.waiting)

    def _once(self) -> Summary:
        self._waited = False
        with Meter(self.submission.batch_id, self.source.size) as self._meter:
            return super()._once()
