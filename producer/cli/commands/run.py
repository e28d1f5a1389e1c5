"""Implements `producer run`, which answers a file of any size window by window."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click

from contract.batch import Batch
from contract.errors import StoreUnavailable
from contract.failures import failures_text, is_wrong, wrong_count, wrong_text
from contract.redis.failures import FailedCode, FailureReads
from contract.settings import Settings, load
from producer.batch_watch import WritesLost
from producer.cli import options
from producer.cli.collect import check_outputs, tell_renamed
from producer.cli.context import Context, Exit, hint, open_input, pass_context
from producer.cli.progress import Meter, counted, tell
from producer.cli.show import cut_text, printable, put_json, written_json
from producer.cli.submitting import (
    check_workers,
    ignored_text,
    make_submission,
    order_text,
    submission_options,
)
from producer.collect.columns import OutputColumns
from producer.collect.outputs import error_file_of
from producer.input.bucket import is_url
from producer.input.files import check_writable
from producer.input.source import Source
from producer.run.again import UNANSWERED
from producer.run.export import Export, needs_export
from producer.run.journal import Journal, RunProgress
from producer.run.local import local_model, local_services
from producer.run.record import RunCancelled, end_record
from producer.run.stopping import RunStopped
from producer.run.windows import Run
from producer.submit.routes import to_default_queue
from producer.submit.submission import Submission

#: Text after the reason why a run has ended early.
_AFTER = {
    RunStopped: "the same command goes on where it stopped, also without --stop-after-failures or "
    "with another limit",
    RunCancelled: "the input cannot be read again, so that OUT lacks the rows that had not run",
}


class _Ended(NamedTuple):
    """The end of a run: its progress, and how many answers were cut, and how many were known.

    `failures` are texts about failed lines, none if there are none or the record is unknown.
    """

    done: RunProgress
    cut: int = 0
    known: int = 0
    failures: Sequence[str] = ()


def _retried(_: click.Context, __: click.Parameter, text: str | None) -> str:
    """Return the outcomes of --retry in their order, joined by commas; '' without the option."""
    if text is None:
        return ""
    given = {word.strip() for word in text.split(",")}
    if not given <= set(UNANSWERED):
        raise click.UsageError("--retry takes failed, cancelled and expired, with commas")
    return ",".join(name for name in UNANSWERED if name in given)


@click.command("run", cls=options.TakesReuse)
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
@click.option(
    "--local",
    is_flag=True,
    help="Start a private Redis and a worker, and end them with the run; --model is then the "
    "model's folder or hub name.",
)
@click.option(
    "--retry",
    metavar="LIST",
    callback=_retried,
    help="Run lines of a complete run again that ended so: failed,cancelled,expired. Wrong lines "
    "stay.",
)
@options.mapped
@submission_options
@options.wait_redis
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
    local: bool,
    retry: str,
    mapped: tuple[str, ...],
    wait_redis: float,
    as_json: bool,
    **values: Any,
) -> Exit:
    """Answer FILE's requests window by window; write the results to OUT in FILE's order.

    FILE may be larger than Redis's memory: Redis has two windows at a time, each a part of FILE,
    and smaller windows if it is full. OUT grows as windows end. With --order prefix, FILE is read
    to its end first, and OUT is sorted into FILE's order at the end. After an interruption, a crash
    or a full disk, the same command continues where OUT ends; OUT.progress records that place.
    FILE, OUT and ERR must differ; an existing OUT or ERR that `run` did not write is refused.

    With --local, nothing else needs to run; WARMQ_ENGINE_ARGS and the like are read as usual. FILE
    may be a table; see `producer submit`. OUT and ERR may be in a bucket, or end with .parquet or
    .csv: then a file OUT.lines grows instead (for a bucket, in this folder), and OUT appears at the
    end. A table has all rows, with their status. OUT.lines stays if --retry can use it.
    """
    _check_places(output, errors)
    export = Export(output, errors or error_file_of(output))
    exported = needs_export(output, export.errors)
    files = export.line_files if exported else (Path(output), Path(export.errors or ""))
    check_outputs(output, errors, file, Journal(files[0]).path)
    context.wait_for_redis(wait_redis)
    submission = _submission(context, values, local=local)
    source = open_input(file, mapped, submission.overrides, submission.keep, values["delimiter"])
    done = export.already_written(source, submission.seed, retry) if exported else None
    if (ended := _ended_before(context, submission, done, local=local)) is None:
        try:
            with _local(context, values["model"]) if local else nullcontext():
                make = partial(Run, window=window, local=local, retry=retry)
                ended = _run(context, submission, source, output, files, make)
        except (RunStopped, RunCancelled) as stop:
            return _print_stop(output, stop, exported)
        if exported and not (ended.done.complete and ended.done.delivered):
            _export(export, submission, source)
    if not local:  # only now, so that whoever follows the run finds OUT at its end
        with hint(f"{output} is complete; the same command notes it in Redis"):
            end_record(context.store, ended.done)
    return _print_result(output, export.errors, ended, as_json, retry)


def _check_places(output: str, errors: str | None) -> None:
    if "-" in (output, errors):
        raise click.UsageError("OUT and ERR must be files: a run continues where they end")
    if not is_url(output):
        check_writable(Path(output))


def _print_stop(output: str, stop: RunStopped | RunCancelled, exported: bool) -> Exit:
    """Print why a run has ended early, and how it goes on; return the exit status."""
    tell(f"{output}: {stop.message}; {_AFTER[type(stop)]}")
    if exported and isinstance(stop, RunStopped):
        tell(f"{output} appears when the run is complete")
    return Exit.SOME_FAILED


def _submission(context: Context, values: dict[str, Any], *, local: bool) -> Submission:
    """Return the submission for the options; Redis is only read for `--model`."""
    if local and values["reuse_s"] is not None:
        raise click.UsageError(
            "--local and --reuse exclude each other: the private Redis, with all answers in it, "
            "ends with the run"
        )
    chosen = values | ({"model": local_model()} if local else {})
    submission = make_submission(context.settings, "run", chosen)
    if local or not submission.model:
        return submission
    return to_default_queue(submission, context.store, context.settings.queue)


@contextmanager
def _local(context: Context, model: str) -> Iterator[None]:
    """Let the context use a private Redis, for which a worker with this model runs."""
    with local_services(model, context.settings.queue, tell) as url:
        context.settings = load(Settings, redis_url=url)
        yield


def _run(
    context: Context,
    /,
    submission: Submission,
    source: Source,
    output: str,
    files: tuple[Path, Path],
    make: Callable[..., Run],
) -> _Ended:
    """Run the input with a progress line; return its end."""
    submission = check_workers(context.store, context.settings, submission)
    start_anew = Journal(files[0]).start_anew
    again = "the same command goes on where it stopped"
    fix_input = f"a run cannot go on with another file: fix this one, and {start_anew}"
    with hint(again, changed=again, fix_input=fix_input), Meter(output) as meter:

        def report(done: RunProgress, waiting: str) -> None:
            text = f"{done.done_text}, {waiting}" if waiting else done.done_text
            if run.choice:
                meter.update(done.line, text, run.planned_lines, force=not waiting)
            else:
                meter.update(source.position, text, source.size, force=not waiting)

        cut = 0
        while True:
            run = make(context.store, context.settings, submission, report=report)
            try:
                done = run.run(source, *files)
                break
            except (WritesLost, RunCancelled) as error:
                # A failover loses the last writes: the run goes on where its output ends. So does
                # a cancelled run, which writes the lines that were not submitted as cancelled.
                if not source.repeatable:
                    raise
                if isinstance(error, WritesLost):
                    tell(f"{output}: {error.message}; goes on where the output ends")
            finally:
                cut += run.cut
                source.close()
            source = source.reopen()
    _tell_end(output, run, done)
    return _Ended(done, cut, *_of_record(context, submission, done.name))


def _ended_before(
    context: Context, submission: Submission, done: RunProgress | None, *, local: bool
) -> _Ended | None:
    """Return the end of a run that an earlier call has completed, None without one."""
    if done is None or local:
        return _Ended(done) if done else None
    return _Ended(done, 0, *_of_record(context, submission, done.name))


def _of_record(context: Context, submission: Submission, run: str) -> tuple[int, Sequence[str]]:
    """Return how many of a run's lines known answers have answered, and texts on its failures."""
    with suppress(StoreUnavailable):
        if (record := context.store.batch(run)) is not None:
            codes = FailureReads.using(context.store).first([record])
            known = record.number("cached") if submission.reuse_s is not None else 0
            return known, _failures(record, codes)
    return 0, ()


def _failures(record: Batch, codes: Sequence[FailedCode]) -> list[str]:
    """Return the counts of a run's failures by code, its first wrong line, and what runs again."""
    wrong = [one for code in codes if is_wrong(code.code) for one in code.first]
    texts = [failures_text(record)]
    if text := wrong_text(codes):
        texts.append(f"{text}, and run the correction as a new file")
    if wrong:
        first = min(wrong, key=lambda one: one.line or 0)
        named = first.line is None or first.message.startswith(("line ", "row "))
        where = "" if named else f"line {first.line}: "
        texts.append(f"first bad line: {where}{printable(first.message)}")
    if again := sum(code.count for code in codes) - wrong_count(codes):
        texts.append(f"the same command with --retry failed runs {counted(again, 'line')} again")
    return list(filter(None, texts))


def _tell_end(output: str, run: Run, done: RunProgress) -> None:
    """Print what a user should know about a run that has ended."""
    if run.cancelled and done.cancelled:
        tell(f"{output}: {done.name} was cancelled: the rows that had not run are in it as "
             "cancelled; the same command with --retry cancelled runs them")  # fmt: skip
    if run.choice:
        tell(f"{output}: {order_text(run.choice)}")
    if run.ignored:
        tell(f"{output}: {ignored_text(run.ignored)}")


def _export(export: Export, submission: Submission, source: Source) -> None:
    """Write the lines of a complete run to a bucket or a table."""
    with hint("the same command writes it again; nothing runs twice"):
        columns = OutputColumns(source.output_columns, submission.overrides)
        tell_renamed(columns, export.output, export.errors)
        export.write(submission.seed, columns)


def _print_result(
    output: str, errors: str | None, ended: _Ended, as_json: bool, retry: str
) -> Exit:
    """Print the numbers of results; return the exit status."""
    done, cut, known, failures = ended
    already = "was complete already, " if done.complete else ""
    of_known = f" ({counted(known, 'known answer')})" if known else ""
    tell(f"{output}: {already}{counted(done.completed, 'result')}{of_known}, {done.unanswered}")
    for text in failures:
        tell(f"{output}: {text}")
    if done.complete and retry:
        wrong = ", except wrong lines" if done.failed and "failed" in retry else ""
        tell(f"{output}: nothing runs again: no line ended as {retry}{wrong}")
    if text := cut_text(cut, "run FILE into another OUT with a higher --set max_tokens=N"):
        tell(f"{output}: {text}")
    if as_json:
        document = {"object": "warmq.run", "lines_read": done.line}
        unanswered = done.ended - done.completed
        put_json(document | written_json(output, errors, done.completed, unanswered))
    if done.completed == done.ended and done.ended:
        return Exit.ALL_WELL
    answerable = done.completed or done.cancelled or done.expired
    return Exit.SOME_FAILED if answerable else Exit.BAD_INPUT
