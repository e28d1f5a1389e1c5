"""The `producer` command: its options, and how it ends.

What the commands do is in commands.py, imported when one runs, so that `--help`
answers at once. Data goes to stdout, progress and messages to stderr.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import click

from contract.errors import StoreUnavailable, WarmqError
from producer.cli.memory import keep_memory

if TYPE_CHECKING:
    from types import ModuleType

USAGE, UNREACHABLE, INTERRUPTED, TERMINATED = 2, 3, 130, 143

_batch = click.argument("batch_id", metavar="BATCH")
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
_output = click.option("-o", "--output", metavar="OUT", help="File for results; `-` is stdout.")
_errors = click.option(
    "--errors",
    metavar="ERR",
    help="File for failed requests. Default: where the results go if that is stdout, else a file "
    "beside OUT (OUT.errors.jsonl).",
)
_model = click.option(
    "--model", metavar="NAME", default="", help="Served model to send the requests to."
)
_priority = click.option(
    "--priority", type=click.IntRange(0, 9), default=6, show_default=True,
    help="0 is the most urgent; steps are 0, 3, 6, 9.",
)  # fmt: skip
_set = click.option(
    "--set", "pairs", metavar="NAME=VALUE", multiple=True,
    help="Set a body field of every line, as max_tokens=256; repeatable.",
)  # fmt: skip


def _commands() -> ModuleType:
    from producer.cli import commands  # noqa: PLC0415 - half a second that --help need not wait for

    return commands


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def cli() -> None:
    """Submit files of LLM requests to warmq, watch them, collect the results.

    \b
      producer submit questions.jsonl --wait -o answers.jsonl

    Redis is named by WARMQ_REDIS_URL (environment, .env or warmq.toml).

    \b
    Exit status:
      0    all well
      1    some requests failed (results, watch, submit --wait)
      2    wrong usage or input
      3    Redis cannot be reached, or refuses
      130  interrupted
    """


@cli.command()
@click.argument("file", metavar="FILE")
@click.option("--batch-id", metavar="ID", help="Name of the batch. The same name resumes it.")
@_model
@_priority
@_set
@click.option("--deadline", metavar="D",
              help="When unfinished requests expire: 90s, 2h, 3d from the batch's creation, or a "
              "time with its zone, as 2026-11-21T08:00:00+01:00.")  # fmt: skip
@click.option("--wait", is_flag=True, help="Follow the batch to its end (-o and --errors do too).")
@_output
@_errors
@_json
def submit(**options: Any) -> int:
    """Queue every line of FILE as one batch.

    FILE is JSON lines, also as .gz or .zst; `-` is standard input. A line is an
    OpenAI batch line or the short form {"prompt": ...} or {"messages": ...}.

    The batch id is printed before the first line is read. A bad line becomes an
    error result, the others run. After an interruption the same command with the
    printed --batch-id goes on where it stopped; no request runs twice. Where Redis
    loses its last writes meanwhile (a failover), this queues them again by itself.

    With --json: {"id"} at once, and the batch's state at the end.
    """
    return int(_commands().submit(**options))


@cli.command()
@click.argument("file", metavar="FILE")
@click.argument("output", metavar="OUT")
@click.option("--errors", metavar="ERR", help="File for failed requests; default OUT.errors.jsonl.")
@click.option(
    "--window", type=click.IntRange(min=1), default=20_000, show_default=True,
    help="Lines to queue at a time, in steps of 500; Redis holds two windows.",
)  # fmt: skip
@_model
@_priority
@_set
def run(**options: Any) -> int:
    """Take FILE through the queue into OUT, in windows, in the order of FILE.

    For files larger than Redis: it holds two windows at a time, whatever FILE is,
    and smaller ones where it is full. OUT grows as windows end. After an interruption,
    a crash or a full disk the same command goes on where OUT ends; OUT.progress
    remembers where that is until all is done. FILE, OUT and ERR are different files,
    and what is there that no run has left is refused, not overwritten.
    """
    return int(_commands().run(**options))


@cli.command()
@_batch
@click.option("--request", "custom_id", metavar="CUSTOM_ID", help="Show one request of the batch.")
@_json
def status(**options: Any) -> int:
    """Show how far a batch, or one request of it, is."""
    return int(_commands().status(**options))


@cli.command()
@_batch
@click.option("--request", "custom_id", metavar="CUSTOM_ID", help="With --stream: this request.")
@click.option("--stream", is_flag=True, help="Print the request's text while it is written.")
@_json
def watch(**options: Any) -> int:
    """Follow a batch to its end: done and failed, rate, tokens/s, time left.

    With --request and --stream: print the text of one request as the model writes
    it, of its first choice; with --json every entry of its stream, all choices.
    """
    return int(_commands().watch(**options))


@cli.command("list")
@_json
def list_batches(**options: Any) -> int:
    """List all batches, newest first."""
    return int(_commands().list_batches(**options))


@cli.command()
@_batch
@_output
@_errors
@click.option("--order", type=click.Choice(["input", "completion"]), default="input",
              show_default=True, help="Order of the lines.")  # fmt: skip
@click.option("--follow", is_flag=True, help="Wait for the results that are not there yet.")
@click.option("--partial", is_flag=True, help="Of an unfinished batch, take what is there.")
def results(**options: Any) -> int:
    """Collect a batch's results, as OpenAI batch output lines.

    A file appears when it is complete, never half-written. A finished batch
    gives exactly one line for each request; if it is deleted, submitted anew or
    retried meanwhile, this ends with 2 and says so, and no file appears.
    """
    return int(_commands().results(**options))


@cli.command()
@_batch
@click.option("--request", "custom_id", metavar="CUSTOM_ID", help="Cancel only this request.")
@_json
def cancel(**options: Any) -> int:
    """Cancel what is not finished, queued or running."""
    return int(_commands().cancel(**options))


@cli.command()
@_batch
@click.option("--include", default="", metavar="LIST", help="Also: cancelled,expired.")
@_json
def retry(**options: Any) -> int:
    """Run a batch's failed requests again. Bad lines stay as they are.

    A deadline that has passed no longer counts for what is retried.
    """
    return int(_commands().retry(**options))


@cli.command()
@_batch
@click.option("--force", is_flag=True, help="Cancel the batch first, if it is not finished.")
@_json
def delete(**options: Any) -> int:
    """Delete a finished batch and its results."""
    return int(_commands().delete(**options))


@cli.group()
def dead() -> None:
    """Look at dead letters: messages that could not be read, or that killed the engine."""


@dead.command("list")
@_json
def dead_list(**options: Any) -> int:
    """List the dead letters, oldest first, without their content."""
    return int(_dead_letters().list_letters(**options))


@dead.command("show")
@click.argument("letter_id", metavar="ID")
def dead_show(**options: Any) -> int:
    """Print one dead letter with its message, as JSON."""
    return int(_dead_letters().show_letter(**options))


@dead.command("retry")
@click.argument("letter_ids", metavar="ID...", nargs=-1)
@click.option("--all", "every", is_flag=True, help="All dead letters.")
@_json
def dead_retry(**options: Any) -> int:
    """Queue dead letters again. Unreadable ones stay."""
    return int(_dead_letters().retry(**options))


@dead.command("delete")
@click.argument("letter_ids", metavar="ID...", nargs=-1)
@click.option("--all", "every", is_flag=True, help="All dead letters.")
@_json
def dead_delete(**options: Any) -> int:
    """Forget dead letters with their messages. Results stay."""
    return int(_dead_letters().delete(**options))


def _dead_letters() -> ModuleType:
    from producer.cli import dead_letters  # noqa: PLC0415 - as above

    return dead_letters


def _terminate(*_: object) -> NoReturn:
    # As an exception, so that unfinished output files are removed on the way.
    raise SystemExit(TERMINATED)


def main() -> NoReturn:
    """Run the command line and exit with its status."""
    signal.signal(signal.SIGTERM, _terminate)
    keep_memory()
    try:
        status = cli.main(prog_name="producer", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        status = USAGE
    except click.Abort:  # click's form of Ctrl-C; a second one must not disturb the ending
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        status = INTERRUPTED
    except StoreUnavailable as error:
        click.echo(f"producer: {error.message}", err=True)
        status = UNREACHABLE
    except WarmqError as error:
        click.echo(f"producer: {error.message}", err=True)
        status = USAGE
    except UnicodeEncodeError:  # the shell passed bytes that are no text: no id has such
        click.echo("producer: an argument is not valid UTF-8", err=True)
        status = USAGE
    except OSError as error:  # of a file whose name it tells, or of what is printed
        where = error.filename or "standard output"
        with contextlib.suppress(OSError):  # it may be this stream that is full
            click.echo(f"producer: cannot use {where}: {error.strerror}", err=True)
        status = USAGE
    _drop_what_cannot_be_printed()
    sys.exit(status or 0)


def _drop_what_cannot_be_printed() -> None:
    """Empty the buffers of full streams: Python would try again, and end with status 120."""
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: closed from the start
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
