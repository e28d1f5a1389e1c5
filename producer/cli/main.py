"""The `producer` command: which commands there are, and how it ends.

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
from typing import Any, NamedTuple, NoReturn

import click

from contract.errors import StoreUnavailable, WarmqError
from contract.naming import nearest
from contract.version import version
from producer.heap import keep_free_memory
from producer.remedies import with_remedy

USAGE, UNREACHABLE, INTERRUPTED, TERMINATED = 2, 3, 130, 143
#: A fault of our own, as sysexits.h has it: no program takes it for requests that failed.
OUR_FAULT = 70

#: Our own commands, each a module of producer/cli/commands, and what `--help` says of them: their
#: modules take half a second to import, which it need not wait for.
COMMANDS = {
    "cancel": "Cancel what is not finished, queued or running.",
    "dead": "Look at dead letters: messages that could not be read, or that killed the engine.",
    "delete": "Delete a finished batch and its results, or a record of `producer serve`.",
    "doctor": "Look for what is in the way: Redis, workers, queues, disk, settings.",
    "list": "List all batches, newest first.",
    "plan": "Say what FILE will take before it is submitted: tokens, Redis, time.",
    "records": "Say what tenants of `producer serve` keep in Redis: files, uploads, batches.",
    "results": "Collect a batch's results, as OpenAI batch output lines.",
    "retry": "Run a batch's failed requests again.",
    "run": "Take FILE through the queue into OUT, in windows, in the order of FILE.",
    "status": "Show how far a batch, or one request of it, is.",
    "submit": "Queue every line of FILE as one batch.",
    "tenant": "Say how tenants share the fleet: by weight, in tokens, with a cap if they need one.",
    "top": "Show the fleet while it works: tokens/s, slots, what waits, workers, batches.",
    "watch": "Follow a batch to its end: done and failed, rate, tokens/s, time left.",
}
#: Packages that bring commands of their own name a table like COMMANDS under this entry point; it
#: stands in the package that has their modules.
ENTRY_POINT = "warmq.commands"
#: The package of our own commands, a file each.
_OWN = "producer.cli.commands"


class Told(NamedTuple):
    """What is known of a command before it is imported: its package, and what `--help` says."""

    package: str
    says: str


@functools.cache
def commands() -> dict[str, Told]:
    """Return all commands by name: our own, and those of packages that bring some."""
    found = {name: Told(_OWN, says) for name, says in COMMANDS.items()}
    for entry in metadata.entry_points(group=ENTRY_POINT):
        found |= {name: Told(entry.module, says) for name, says in entry.load().items()}
    return dict(sorted(found.items()))


class Commands(click.Group):
    """A group whose commands are imported when they run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, in the order of `--help`."""
        return list(commands())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; None if there is none of that name."""
        if cmd_name in COMMANDS:
            package = _OWN
        elif found := commands().get(cmd_name):  # a look at all packages, which takes a while
            package = found.package
        else:
            return None
        command: click.Command = importlib.import_module(f"{package}.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that is meant; the error of an unknown name tells the nearest one."""
        try:
            return super().resolve_command(ctx, args)
        except click.NoSuchCommand:
            near = nearest(args[0], commands())
            raise click.NoSuchCommand(
                args[0], possibilities=[near] if near else [], ctx=ctx
            ) from None

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Read the command line; a reader of `--help` may see enough before its end."""
        with _read_enough():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; who reads its output may see enough before its end, as `head` does."""
        with _read_enough():
            return super().invoke(ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, told.says) for name, told in commands().items()])


def _print_version(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        click.echo(f"warmq {version()}")
        ctx.exit()


@contextlib.contextmanager
def _read_enough() -> Iterator[None]:
    """End without a word, and well, where the output's reader has closed it; click ends with 1."""
    try:
        yield
    except BrokenPipeError:
        raise click.exceptions.Exit(0) from None


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
      0    all well, or who read the output has closed it (as `head` does)
      1    some requests failed (results, watch, submit --wait), or a problem (doctor)
      2    wrong usage or input
      3    Redis cannot be reached, or refuses
      70   a fault of producer itself; please report it
      130  interrupted
    """


def _terminate(*_: object) -> NoReturn:
    # As an exception, so that unfinished output files are removed on the way.
    raise SystemExit(TERMINATED)


def main() -> NoReturn:
    """Run the command line and exit with its status."""
    signal.signal(signal.SIGTERM, _terminate)
    keep_free_memory()
    try:
        status = cli.main(prog_name="producer", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        status = USAGE
    except click.Abort:  # click's form of Ctrl-C; a second one must not disturb the ending
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        status = INTERRUPTED
    except WarmqError as error:
        click.echo(f"producer: {with_remedy(error)}", err=True)
        status = UNREACHABLE if isinstance(error, StoreUnavailable) else USAGE
    except UnicodeEncodeError:  # the shell passed bytes that are no text: no id has such
        click.echo("producer: an argument is not valid UTF-8", err=True)
        status = USAGE
    except OSError as error:  # of a file whose name it tells, or of what is printed
        where = error.filename or "standard output"
        with contextlib.suppress(OSError):  # it may be this stream that is full
            click.echo(f"producer: cannot use {where}: {error.strerror}", err=True)
        status = USAGE
    except Exception as error:  # of a library, or of our own: no traceback for who uses it
        click.echo(f"producer: {_as_fault(error)}", err=True)
        status = OUR_FAULT
    _drop_what_cannot_be_printed()
    sys.exit(status or 0)


def _as_fault(error: Exception) -> str:
    """Return what whoever mends a fault needs: what was raised, and where."""
    at = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f" ({frame.filename}:{frame.lineno})" for frame in at)
    first = str(error).partition("\n")[0]
    return f"a fault of its own: {type(error).__name__}: {first}{where}; please report it"


def _drop_what_cannot_be_printed() -> None:
    """Empty the buffers of full streams: Python would try again, and end with status 120."""
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: closed from the start
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
