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
    ignored_text,
    make_submission,
    order_text,
    submission_options,
    tell_if_unserved,
)
from producer.collect.outputs import error_file_of
from producer.input.bucket import is_url
from producer.input.files import check_writable
from producer.input.source import Source
from producer.queue_workers import refuse_older_workers
from producer.run.export import Export, needs_export
from producer.run.journal import Journal, RunProgress
from producer.run.windows import Run
from producer.submit.submission import Submission


@click.command("run")
@click.argument("file", metavar="FILE")
@click.argument("output", metavar="OUT")
@click.option("--errors", metavar="ERR", help=options.ERRORS_HELP)
@click.option(
    "--window",
    type=click.IntRange(min=1),
    default=20_000,
    show_default=True,
    help="Lines to queue at a time, in steps of 500; Redis holds two windows.",
)
@options.mapped
@submission_options
@options.as_json
@pass_context
def command(
    context: Context,
    /,
    *,
    file: str,
    output: str,
    errors: str | None,
    window: int,
    mapped: tuple[str, ...],
    as_json: bool,
    **shaping: Any,
) -> Exit:
    """Answer FILE into OUT, window by window, in the order of FILE.

    FILE may be larger than Redis's memory: Redis has two windows at a time, each a
    part of FILE, and smaller windows if it is full. OUT grows as windows end. With
    --order prefix, FILE is read to its end first, and OUT is sorted into FILE's order
    at the end. After an interruption, a crash or a full disk, the same command
    continues where OUT ends; OUT.progress records that place. FILE, OUT and ERR must
    be different files; an existing OUT or ERR that `run` did not write is refused.

    FILE may be a table; see `producer submit`. OUT and ERR may be in a bucket, or end
    with .parquet: then a file OUT.lines grows instead (for a bucket, in this folder),
    and OUT appears at the end.
    """
    if "-" in (output, errors):
        raise click.UsageError("OUT and ERR must be files: a run continues where they end")
    if not is_url(output):
        check_writable(Path(output))
    export = Export(output, errors or error_file_of(output))
    exported = needs_export(output, export.errors)
    files = export.line_files if exported else (Path(output), Path(export.errors))
    check_outputs(output, errors, file, Journal(files[0]).path)
    submission = make_submission(context.settings, "run", shaping)
    source = open_input(file, mapped, submission.overrides)
    done = export.already_written(source, submission.seed) if exported else None
    if done is None:
        refuse_older_workers(context.store, submission.queue)
        tell_if_unserved(context.store, context.settings.queue, submission.model)
        done = _run(context, submission, source, output, files, window)
        if exported:
            with hint("the same command writes it again; nothing runs twice"):
                export.write(submission.seed)
    return _print_result(output, export.errors, done, as_json)


def _run(
    context: Context,
    /,
    submission: Submission,
    source: Source,
    output: str,
    files: tuple[Path, Path],
    window: int,
) -> RunProgress:
    """Run the input with a progress line; return the run's progress at its end."""
    start_anew = Journal(files[0]).start_anew
    again = "the same command goes on where it stopped"
    fix_input = f"a run cannot go on with another file: fix this one, and {start_anew}"
    with hint(again, changed=again, fix_input=fix_input), Meter(output) as meter:

        def report(done: RunProgress, waiting: str) -> None:
            text = f"{done.line} lines done, {done.failed} failed"
            if waiting:
                text += f", waiting: {waiting}"
            if run.choice:
                meter.update(done.line, text, run.planned_lines, force=not waiting)
            else:
                meter.update(source.position, text, source.size, force=not waiting)

        run = Run(context.store, context.settings, submission, window, report)
        try:
            done = run.run(source, *files)
        finally:
            source.close()
    if run.choice:
        tell(f"{output}: {order_text(run.choice)}")
    if run.ignored:
        tell(f"{output}: {ignored_text(run.ignored)}")
    return done


def _print_result(output: str, errors: str, done: RunProgress, as_json: bool) -> Exit:
    """Print the numbers of results; return the exit status."""
    already = "was complete already, " if done.complete else ""
    tell(f"{output}: {already}{counted(done.completed, 'result')}, {done.failed} failed")
    if as_json:
        document = {"object": "warmq.run", "lines_read": done.line}
        put_json(document | written_json(output, errors, done.completed, done.failed))
    if not done.completed:
        return Exit.BAD_INPUT
    return Exit.SOME_FAILED if done.failed else Exit.ALL_WELL
