"""`producer run`."""

from pathlib import Path
from typing import Any

import click

from producer.cli import options
from producer.cli.collect import check_outputs
from producer.cli.context import Context, Exit, hint, open_input, pass_context
from producer.cli.progress import Meter, counted, tell
from producer.cli.show import put_json, written_json
from producer.cli.submitting import (
    ignored_fields,
    make_submission,
    order,
    shaping_options,
    tell_if_unserved,
)
from producer.collect.outputs import beside as beside_of
from producer.input.bucket import is_url
from producer.input.files import check_writable
from producer.input.source import Source
from producer.queue_workers import refuse_older_workers
from producer.run.export import Export, cannot_grow
from producer.run.journal import Journal, RunProgress
from producer.run.windows import Run
from producer.submit.submission import Submission


@click.command("run")
@click.argument("file", metavar="FILE")
@click.argument("output", metavar="OUT")
@click.option("--errors", metavar="ERR", help=options.ERRORS_BESIDE)
@click.option(
    "--window",
    type=click.IntRange(min=1),
    default=20_000,
    show_default=True,
    help="Lines to queue at a time, in steps of 500; Redis holds two windows.",
)
@options.mapped
@shaping_options
@options.as_json
@pass_context
def command(
    context: Context,
    *,
    file: str,
    output: str,
    errors: str | None,
    window: int,
    mapped: tuple[str, ...],
    shaping: dict[str, Any],
    as_json: bool,
) -> Exit:
    """Take FILE through the queue into OUT, in windows, in the order of FILE.

    For files larger than Redis: it holds two windows at a time, whatever FILE is,
    and smaller ones where it is full. OUT grows as windows end; with --order prefix
    FILE is read whole first, and OUT is put into FILE's order at the end. After an interruption,
    a crash or a full disk the same command goes on where OUT ends; OUT.progress
    remembers where that is, and that all is done. FILE, OUT and ERR are different files,
    and what is there that no run has left is refused, not overwritten.

    FILE may be a table, as for submit. OUT and ERR may be in a bucket, or end with
    .parquet: then a file OUT.lines grows instead (for a bucket, in this folder), and
    OUT appears when all is done.
    """
    if "-" in (output, errors):
        raise click.UsageError("OUT and ERR must be files: a run goes on where they end")
    if not is_url(output):
        check_writable(Path(output))
    delivery = Export(output, errors or beside_of(output))
    delivered = cannot_grow(output, delivery.errors)
    places = delivery.gathered if delivered else (Path(output), Path(delivery.errors))
    check_outputs(output, errors, file, Journal(places[0]).path)
    submission = make_submission(context.settings, "run", shaping)
    source = open_input(file, mapped, submission.overrides)
    done = delivery.done_before(source, submission.seed) if delivered else None
    if done is None:
        refuse_older_workers(context.store, submission.queue)
        tell_if_unserved(context.store, context.settings.queue, submission.model)
        done = _taken(context, submission, source, output, places, window)
        if delivered:
            with hint("the same command writes it again; nothing runs twice"):
                delivery.deliver(submission.seed)
    return _ended(output, delivery.errors, done, as_json)


def _taken(
    context: Context,
    submission: Submission,
    source: Source,
    output: str,
    places: tuple[Path, Path],
    window: int,
) -> RunProgress:
    """Take the input through, showing how far it is; return what is in the two files then."""
    start_anew = Journal(places[0]).start_anew
    again = "the same command goes on where it stopped"
    mended = f"the run cannot go on with another file: mend this one, and {start_anew}"
    with hint(again, changed=again, mended=mended), Meter(output) as meter:

        def report(done: RunProgress, waiting: str) -> None:
            text = f"{done.line} lines done, {done.failed} failed"
            if waiting:
                text += f", waiting: {waiting}"
            taken = (
                (done.line, wide.planned_lines) if wide.choice else (source.position, source.size)
            )
            meter.update(taken[0], text, taken[1], at_once=not waiting)

        wide = Run(context.store, context.settings, submission, window, report)
        try:
            done = wide.run(source, *places)
        finally:
            source.close()
    if wide.choice:
        tell(f"{output}: {order(wide.choice)}")
    if wide.ignored:
        tell(f"{output}: {ignored_fields(wide.ignored)}")
    return done


def _ended(output: str, errors: str, done: RunProgress, as_json: bool) -> Exit:
    """Tell what the run has written."""
    already = "was complete already, " if done.complete else ""
    tell(f"{output}: {already}{counted(done.completed, 'result')}, {done.failed} failed")
    if as_json:
        document = {"object": "warmq.run", "lines_read": done.line}
        put_json(document | written_json(output, errors, done.completed, done.failed))
    if not done.completed:
        return Exit.BAD_INPUT
    return Exit.SOME_FAILED if done.failed else Exit.ALL_WELL
