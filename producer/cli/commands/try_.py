"""Implements `producer try`, which runs a few rows of a file as a trial."""

import contextlib
import signal
import time
from collections.abc import Iterator
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.table import Table
from rich.text import Text

from contract.errors import StoreUnavailable
from producer.cli import show
from producer.cli.commands import submit as submit_command
from producer.cli.commands.plan import known_workers, plan_json, requests_text, time_text
from producer.cli.context import Context, Exit, open_input, pass_context
from producer.cli.progress import REPEAT_S, Meter, counted, tell
from producer.cli.submitting import check_workers, make_submission
from producer.queue_workers import QueueWorkers
from producer.run.trial import (
    MOST_ROWS,
    ROWS,
    Spread,
    Trial,
    TriedRow,
    failures,
    measured_plan,
)
from producer.stalls import StallReads
from producer.submit.plan import FileContent, Plan, plan
from producer.submit.prompt_tokens import CharacterCounter
from producer.submit.submission import Submission

#: Options of `submit` that a trial takes and does not use.
_UNUSED = (
    "batch_id",
    "deadline",
    "wait",
    "output",
    "errors",
    "force",
    "wait_redis",
    "stop_after",
    "notify",
)
#: Sources of the value of an option that the user has given.
_GIVEN = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
#: Most characters shown of a prompt, and of an answer.
_PROMPT_CHARACTERS, _ANSWER_CHARACTERS = 400, 800
#: Width of the table in characters if standard output is no terminal.
_WIDTH = 120
#: Most bad lines of the file whose errors are printed.
_MOST_BAD_LINES = 3
#: Names of a row's fields with its tokens.
_TOKENS = ("prompt_tokens", "completion_tokens")
#: Signals that end the command.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@click.command("try")
@click.option(
    "--rows",
    type=click.IntRange(1, MOST_ROWS),
    default=ROWS,
    show_default=True,
    help="Rows to run, spread evenly over FILE.",
)
@pass_context
def command(
    context: Context,
    /,
    *,
    rows: int,
    file: str,
    mapped: tuple[str, ...],
    as_json: bool,
    **values: Any,
) -> Exit:
    """Run a few rows of FILE now, and show prompts, answers and the plan of FILE.
    The options of `producer submit` are taken, too.

    The rows are spread evenly over FILE. They run before all other requests, in a
    batch of their own that is removed at the end; Ctrl-C cancels it. The tokens of the
    whole FILE are computed from these answers, its time from the workers' latest work.
    """
    _tell_unused()
    submission = make_submission(context.settings, "try", values)
    source = open_input(file, mapped, submission.overrides, submission.keep, values["delimiter"])
    store, queue = context.store, submission.queue
    submission = check_workers(store, context.settings, submission)
    workers, outlook = known_workers(context, [queue])
    spread = Spread(rows)
    with Meter(file, source.size) as meter:

        def report(content: FileContent) -> None:
            if meter.due():
                meter.update(source.position, f"{content.lines} lines read")

        planned = plan(
            context.settings, submission, source, CharacterCounter(), workers, outlook, report,
            spread.watch,
        )  # fmt: skip
    tried = _run(context, submission, spread, file)
    # The worker that ran the rows may have started after them.
    workers, outlook = known_workers(context, [queue])
    planned = measured_plan(planned, tried).on(len(workers), outlook, submission)
    if as_json:
        show.put_json(_json(file, tried, planned))
    else:
        _print_table(tried)
        _print_summary(file, tried, planned)
    if not planned.content.requests:
        return Exit.BAD_INPUT
    return Exit.ALL_WELL if all(row.ok for row in tried) else Exit.SOME_FAILED


# `try` takes every option of `submit`, so that a user only has to replace `submit` with `try`.
command.params[:0] = submit_command.command.params


def _tell_unused() -> None:
    """Print which of the given options of `submit` a trial does not use."""
    given_by = click.get_current_context().get_parameter_source
    given = [p for p in command.params if p.name in _UNUSED and given_by(p.name) in _GIVEN]
    if given:
        tell(f"not used by a trial: {', '.join(param.opts[-1] for param in given)}")


def _run(context: Context, submission: Submission, spread: Spread, file: str) -> list[TriedRow]:
    """Run the rows; remove their batch at the end, also after an error or a signal."""
    trial = Trial(context.store, context.settings, submission, spread)
    workers = QueueWorkers(context.store, submission.queue)
    tried: list[TriedRow] = []
    total, tell_at = len(spread.chosen), time.monotonic()
    with _removed_at_end(trial), Meter(trial.id, total) as meter:
        trial.begin(file)

        def sleep(seconds: float) -> None:
            nonlocal tell_at
            if time.monotonic() >= tell_at:
                tell_at += REPEAT_S
                for text in _why_waiting(context, trial):
                    meter.note(text)
            if meter.due():
                state = trial.state()
                ended = state.terminal if state is not None else 0
                meter.update(ended, f"{ended} of {counted(total, 'row')} done, {workers.text()}")
            time.sleep(seconds)

        tried += trial.follow(sleep)
    return tried


def _why_waiting(context: Context, trial: Trial) -> Iterator[str]:
    """Yield the reasons why a trial's rows cannot run now, each with its remedy."""
    batch = trial.state()
    if batch is not None and not batch.finished:
        reads = StallReads.using(context.store)
        for one in reads.stalls(context.settings, batch.queues, [batch], batch.tenant):
            yield f"it waits: {one.sentence()}: {one.advice()}"


@contextlib.contextmanager
def _removed_at_end(trial: Trial) -> Iterator[None]:
    """Remove the trial's batch at the end, uninterrupted by signals: a terminal may send two."""
    try:
        yield
    finally:
        handlers = {number: signal.signal(number, signal.SIG_IGN) for number in _SIGNALS}
        try:
            trial.drop()
        except StoreUnavailable as error:
            tell(f"{trial.id} could not be removed; Redis removes it when it has expired: {error}")
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _print_table(tried: list[TriedRow]) -> None:
    """Print prompts and answers side by side."""
    table = Table("custom_id", "prompt", "answer", show_lines=True, expand=True)
    table.columns[1].ratio, table.columns[2].ratio = 1, 1
    for row in tried:
        table.add_row(_cell(row.custom_id, 40), _cell(row.prompt, _PROMPT_CHARACTERS), _answer(row))
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    console.print(table)


def _answer(row: TriedRow) -> Text:
    """Return the answer with its tokens, or the error."""
    if not row.ok:
        return _cell(f"{row.error_code}: {row.error_message}", _ANSWER_CHARACTERS, "red")
    text = _cell(_shown(row.text or ""), _ANSWER_CHARACTERS)
    tokens = f"{row.prompt_tokens} + {row.completion_tokens} tokens, {row.finish_reason}"
    return text.append(f"\n{tokens}", "dim")


def _shown(answer: str) -> str:
    """Return an answer without blank lines at its ends; name an answer that has no other text."""
    if not answer:
        return "(no text)"
    return answer.strip("\r\n") if answer.strip() else f"(only blanks: {len(answer)} characters)"


def _cell(text: str, most: int, style: str = "") -> Text:
    """Return the beginning of a text, without control characters."""
    shown = f"{text[:most]}…" if len(text) > most else text
    lines = (show.printable(line) for line in shown.splitlines())
    return Text("\n".join(lines), style=style)


def _print_summary(file: str, tried: list[TriedRow], planned: Plan) -> None:
    """Print what failed, the tokens, and the plan of the whole file."""
    failed, content = failures(tried), planned.content
    done = sum(row.ok for row in tried)
    usage = [sum(getattr(row, name) or 0 for row in tried) for name in _TOKENS]
    text = f"{done} of {counted(len(tried), 'row')} answered"
    if failed:
        text += "; failed: " + ", ".join(f"{n} {code}" for code, n in failed.most_common())
    cut = sum(row.finish_reason == "length" for row in tried)
    tokens = f"{usage[0]:,} prompt, {usage[1]:,} completion"
    by = "estimated from these answers" if done else "estimated from characters"
    show.put_rows({
        "tried": text,
        "tokens": tokens,
        "cut": f"{counted(cut, 'answer')} reached max_tokens" if cut else None,
        "whole file": file,
        "requests": requests_text(content),
        "tokens in": f"about {content.prompt_tokens:,}, {by}",
        "tokens out": f"about {content.expected:,.0f}, {by}" if done else None,
        "redis": f"{show.size_text(planned.memory.most)} at most",
        "time": time_text(planned),
    })  # fmt: skip
    for error in content.first_bad[:_MOST_BAD_LINES]:
        click.echo(show.printable(f"bad: {error}"))
    if content.bad > _MOST_BAD_LINES:
        click.echo(f"bad: {content.bad - _MOST_BAD_LINES:,} more")


def _json(file: str, tried: list[TriedRow], planned: Plan) -> dict[str, Any]:
    """Return the JSON object of a trial."""
    done = sum(row.ok for row in tried)
    return {
        "object": "warmq.trial",
        "input_file": file,
        "rows": [
            {
                "line": row.line,
                "custom_id": row.custom_id,
                "prompt": row.prompt,
                "text": row.text,
                "finish_reason": row.finish_reason,
                "prompt_tokens": row.prompt_tokens,
                "completion_tokens": row.completion_tokens,
                "error_code": row.error_code,
                "error_message": row.error_message,
            }
            for row in tried
        ],
        "request_counts": {"completed": done, "failed": len(tried) - done},
        "failures": dict(failures(tried)),
        "plan": plan_json(file, planned),
    }
