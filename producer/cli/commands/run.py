"""`producer run`."""

from pathlib import Path

import click

from contract.naming import queue_name
from producer.cli import options
from producer.cli.collect import check_outputs, errors_beside
from producer.cli.context import Context, Exit, hint, open_input, pass_context
from producer.cli.progress import Meter, tell
from producer.cli.values import parse_overrides
from producer.core.journal import Journal, RunProgress
from producer.core.submission import Submission
from producer.core.windows import Run


@click.command("run")
@click.argument("file", metavar="FILE")
@click.argument("output", metavar="OUT")
@click.option("--errors", metavar="ERR", help="File for failed requests; default OUT.errors.jsonl.")
@click.option(
    "--window",
    type=click.IntRange(min=1),
    default=20_000,
    show_default=True,
    help="Lines to queue at a time, in steps of 500; Redis holds two windows.",
)
@options.model
@options.priority
@options.pairs
@pass_context
def command(
    context: Context,
    *,
    file: str,
    output: str,
    errors: str | None,
    window: int,
    model: str,
    priority: int,
    pairs: tuple[str, ...],
) -> Exit:
    """Take FILE through the queue into OUT, in windows, in the order of FILE.

    For files larger than Redis: it holds two windows at a time, whatever FILE is,
    and smaller ones where it is full. OUT grows as windows end. After an interruption,
    a crash or a full disk the same command goes on where OUT ends; OUT.progress
    remembers where that is until all is done. FILE, OUT and ERR are different files,
    and what is there that no run has left is refused, not overwritten.
    """
    if "-" in (output, errors):
        raise click.UsageError("OUT and ERR must be files: a run goes on where they end")
    check_outputs(output, errors, file, Journal(Path(output)).path)
    settings = context.settings
    queue = queue_name(model or None, settings.queue)
    submission = Submission("run", queue, priority, model, parse_overrides(pairs))
    submission.check()
    source = open_input(file)
    again = "the same command goes on where it stopped"
    with hint(again, changed=again), Meter(output) as meter:

        def report(done: RunProgress, waiting: str) -> None:
            text = f"{done.line} lines done, {done.failed} failed"
            if waiting:
                text += f", waiting: {waiting}"
            meter.update(source.position, text, source.size, at_once=not waiting)

        wide = Run(context.store, settings, submission, window, report)
        try:
            done = wide.run(source, Path(output), Path(errors or errors_beside(output)))
        finally:
            source.close()
    tell(f"{output}: {done.completed} results, {done.failed} failed")
    if not done.completed:
        return Exit.BAD_INPUT
    return Exit.SOME_FAILED if done.failed else Exit.ALL_WELL
