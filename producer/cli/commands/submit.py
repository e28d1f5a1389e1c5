"""`producer submit`."""

from __future__ import annotations

import datetime as dt
import secrets
import time

import click

from contract.redis.keys import queue_name
from producer.cli import options, show
from producer.cli.collect import check_outputs, collect
from producer.cli.context import (
    ALL_WELL,
    BAD_INPUT,
    WATCH_AGAIN,
    Context,
    hint,
    open_input,
    pass_context,
)  # fmt: skip
from producer.cli.progress import tell
from producer.cli.resume import ResumingSubmit
from producer.cli.values import parse_deadline, parse_overrides
from producer.core.queue_workers import QueueWorkers
from producer.core.submission import Submission
from producer.core.submit import Summary


@click.command("submit")
@click.argument("file", metavar="FILE")
@click.option("--batch-id", metavar="ID", help="Name of the batch. The same name resumes it.")
@options.model
@options.priority
@options.pairs
@click.option("--deadline", metavar="D",
              help="When unfinished requests expire: 90s, 2h, 3d from the batch's creation, or a "
              "time with its zone, as 2026-11-21T08:00:00+01:00.")  # fmt: skip
@click.option("--wait", is_flag=True, help="Follow the batch to its end (-o and --errors do too).")
@options.output
@options.errors
@options.as_json
@pass_context
def command(
    context: Context, *, file: str, batch_id: str | None, model: str, priority: int,
    pairs: tuple[str, ...], deadline: str | None, wait: bool, output: str | None,
    errors: str | None, as_json: bool,
) -> int:  # fmt: skip
    """Queue every line of FILE as one batch.

    FILE is JSON lines, also as .gz or .zst; `-` is standard input. A line is an
    OpenAI batch line or the short form {"prompt": ...} or {"messages": ...}.

    The batch id is printed before the first line is read. A bad line becomes an
    error result, the others run. After an interruption the same command with the
    printed --batch-id goes on where it stopped; no request runs twice. Where Redis
    loses its last writes meanwhile (a failover), this queues them again by itself.

    With --json: {"id"} at once, and the batch's state at the end.
    """
    if output or errors:
        check_outputs(output, errors, file)
    settings, name = context.settings, batch_id or _new_batch_id()
    queue = queue_name(model or None, settings.queue)
    overrides, until = parse_overrides(pairs), parse_deadline(deadline)
    submission = Submission(name, queue, priority, model, overrides, until)
    submission.check()
    source = open_input(file)
    # With `-o -` stdout is for results alone.
    click.echo(f'{{"id":"{name}"}}' if as_json else name, err=output == "-")
    began = time.monotonic()
    with hint(f"the same command with --batch-id {name} goes on where it stopped"):
        submitting = ResumingSubmit(context.store, settings, submission, source)
        summary = submitting.submit()
    tell(_told(summary, time.monotonic() - began))
    if not (summary.batch.finished or context.store.workers(queue)):
        tell(f"{name}: {QueueWorkers(context.store, queue).text()}; the requests wait there")
    status, batch = ALL_WELL, summary.batch
    if wait or output or errors:
        with hint(WATCH_AGAIN.format(name)):
            batch = submitting.watched(batch)
        status = show.ended(batch)
    if output or errors:
        with hint(f"the batch has ended; `producer results {name}` collects it again"):
            collect(context.store, batch, "input", output, errors)
    if as_json:
        click.echo(show.json_text(show.batch_json(batch)), err=output == "-")
    return BAD_INPUT if summary.batch.number("valid") == 0 else status


def _new_batch_id() -> str:
    return f"batch_{dt.datetime.now(dt.UTC):%Y%m%d%H%M%S}_{secrets.token_hex(8)}"


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
    deadline = show.iso_time(batch.fields.get("deadline"))
    if deadline and not batch.finished:
        text += f", deadline {deadline}"
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
