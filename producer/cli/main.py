"""Runs the `producer` command: finds its subcommands, and sets its exit status.

Data goes to stdout, progress and messages to stderr.
"""

import contextlib
import functools
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from importlib import metadata
from typing import Any, NoReturn

import click

from contract.errors import StoreUnavailable, WarmqError
from contract.naming import nearest
from contract.version import version
from producer.heap import keep_free_memory
from producer.remedies import with_remedy

#: Exit statuses for wrong usage or input, for an unreachable Redis, for Ctrl-C and for SIGTERM.
USAGE, UNREACHABLE, INTERRUPTED, TERMINATED = 2, 3, 130, 143
#: Exit status for SIGHUP: the terminal was closed.
HUNG_UP = 129
#: Exit status of an internal error (EX_SOFTWARE in sysexits.h), which differs from failed requests.
INTERNAL_ERROR = 70

#: Commands of producer/cli/commands, and their lines in `--help`. `--help` does not import the
#: commands, because that takes half a second.
COMMANDS = {
    "cancel": "Cancel a batch's or run's requests.",
    "dead": "Inspect dead letters: messages that are unreadable, or that killed the engine.",
    "delete": "Delete a finished batch and its results, or a record of `producer serve`.",
    "doctor": "Check Redis, workers, queues, disk and settings, and name what stops the work.",
    "list": "List all batches, newest first.",
    "plan": "Estimate the tokens, Redis memory and time that FILE takes. Queues nothing.",
    "records": "List what tenants of `producer serve` keep in Redis, such as files and batches.",
    "results": "Collect a batch's results, as OpenAI batch output lines.",
    "retry": "Run a batch's failed requests again.",
    "run": "Answer FILE's requests window by window; write the results to OUT in FILE's order.",
    "status": "Show the progress of a batch, run or request.",
    "submit": "Queue every line of FILE as one batch.",
    "tenant": "Set how tenants share the workers: a weight, and a cap if needed.",
    "top": "Show all workers live: tokens/s, slots, waiting requests, workers, batches.",
    "try": "Run a few rows of FILE now, and show prompts, answers and the plan of FILE.",
    "watch": "Follow a batch or run to its end: counts, rates (last 30 s), time left.",
}
#: Group of entry points by which other packages add commands. An entry point is a table like
#: COMMANDS, in the package that has the commands' modules.
ENTRY_POINT = "warmq.commands"
#: Package of the commands in COMMANDS.
_OWN_PACKAGE = "producer.cli.commands"
#: Commands that are in batches.py; each other command has a module of its own.
_IN_BATCHES_MODULE = frozenset({"cancel", "delete", "list", "retry", "status"})
#: Command -> its module, which has another name because the command's is a keyword of Python.
_MODULES = {"try": "try_"}


@functools.cache
def commands() -> dict[str, tuple[str, str]]:
    """Return the package and the line in `--help` of every command, by name."""
    found = {name: (_OWN_PACKAGE, summary) for name, summary in COMMANDS.items()}
    for entry in metadata.entry_points(group=ENTRY_POINT):
        found |= {name: (entry.module, summary) for name, summary in entry.load().items()}
    return dict(sorted(found.items()))


class Commands(click.Group):
    """A group whose commands are imported when they run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(commands())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; None for an unknown name."""
        command: click.Command
        if cmd_name in _IN_BATCHES_MODULE:
            command = importlib.import_module(f"{_OWN_PACKAGE}.batches").COMMANDS[cmd_name]
            return command
        # Reading entry points takes time, so they are read only for names not in COMMANDS.
        if cmd_name not in COMMANDS and cmd_name not in commands():
            return None
        package = _OWN_PACKAGE if cmd_name in COMMANDS else commands()[cmd_name][0]
        command = importlib.import_module(f"{package}.{_MODULES.get(cmd_name, cmd_name)}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Suggest the nearest command for an unknown name."""
        try:
            return super().resolve_command(ctx, args)
        except click.NoSuchCommand:
            near = nearest(args[0], commands())
            raise click.NoSuchCommand(
                args[0], possibilities=[near] if near else [], ctx=ctx
            ) from None

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _exit_0_on_closed_pipe():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with _exit_0_on_closed_pipe():
            return super().invoke(ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in commands().items()])


@contextlib.contextmanager
def _exit_0_on_closed_pipe() -> Iterator[None]:
    """Exit 0 silently on a closed pipe, for example after `| head`; click would exit 1."""
    try:
        yield
    except BrokenPipeError:
        raise click.exceptions.Exit(0) from None


def _print_version(ctx: click.Context, _: click.Parameter, given: bool) -> None:
    if given and not ctx.resilient_parsing:
        click.echo(f"warmq {version()}")
        ctx.exit()


@click.group(
    cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the version of warmq.",
)
def cli() -> None:
    """Submit files of LLM requests to warmq, watch them, collect the results.

    \b
      producer submit questions.jsonl --wait -o answers.jsonl

    Redis is named by WARMQ_REDIS_URL (environment, .env or warmq.toml).

    \b
    Completion of commands, options and batch ids, in bash (or zsh, fish):
      eval "$(_PRODUCER_COMPLETE=bash_source producer)"

    \b
    Exit status:
      0    success, or the reader of the output closed it (as `head` does)
      1    some requests failed (results, watch, try, submit --wait), or a problem (doctor)
      2    wrong usage or input
      3    Redis cannot be reached, or refuses commands
      70   an internal error; please report it
      130  interrupted
    """


def _terminate(number: int, _: object) -> NoReturn:
    # An exception ends the context managers, which remove unfinished output files.
    raise SystemExit(HUNG_UP if number == signal.SIGHUP else TERMINATED)


def main() -> NoReturn:
    """Run the command line and exit with its status."""
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # `nohup` sets SIG_IGN
        signal.signal(signal.SIGHUP, _terminate)
    keep_free_memory()
    try:
        status = cli.main(prog_name="producer", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        status = USAGE
    except click.Abort:  # Ctrl-C in click; a second Ctrl-C must not interrupt the exit
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        status = INTERRUPTED
    except WarmqError as error:
        click.echo(f"producer: {with_remedy(error)}", err=True)
        status = UNREACHABLE if isinstance(error, StoreUnavailable) else USAGE
    except UnicodeEncodeError:  # an argument that is not UTF-8 was used as an id
        click.echo("producer: an argument is not valid UTF-8", err=True)
        status = USAGE
    except OSError as error:
        where = error.filename or "standard output"
        with contextlib.suppress(OSError):  # stderr itself may be full
            click.echo(f"producer: cannot use {where}: {error.strerror}", err=True)
        status = USAGE
    except Exception as error:
        click.echo(f"producer: {_bug_report(error)}", err=True)
        status = INTERNAL_ERROR
    _discard_unprinted_output()
    sys.exit(status or 0)


def _bug_report(error: Exception) -> str:
    """Return the error and its place in the code on one line; users get no traceback."""
    at = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f" ({frame.filename}:{frame.lineno})" for frame in at)
    first = str(error).partition("\n")[0]
    return f"internal error: {type(error).__name__}: {first}{where}; please report it"


def _discard_unprinted_output() -> None:
    """Discard the buffers of full streams; Python would flush them again and exit with 120."""
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: closed from the start
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
