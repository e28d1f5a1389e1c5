"""How a command beside the worker is run: `python -m worker.compile`, `python -m worker.triton`."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from contract.settings import SettingsError
from worker.machine.finding import Finding

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
version_option = click.version_option(package_name="warmq", message="warmq %(version)s")
FOLDER = click.Path(path_type=Path)
USAGE, INTERRUPTED = 2, 130


def run(command: click.Command, argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status, which is 2 for a wrong command line or setting.

    Args:
        command: returns its exit status.
        argv: its words without its name; None: those of this process.
    """
    try:
        status = command.main(argv, f"python -m worker.{command.name}", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        status = USAGE
    except SettingsError as error:
        click.echo(error, err=True)
        status = USAGE
    except click.Abort:  # click's form of Ctrl-C
        status = INTERRUPTED
    return int(status or 0)


def problem_lines(found: Sequence[Finding]) -> Iterator[str]:
    """Yield the problems, each with its remedy in a second line; what is fatal comes last."""
    for finding in sorted(found, key=lambda one: not one.fatal):
        yield f"{'problem' if finding.fatal else 'note'}: {finding.problem}\n  do: {finding.remedy}"
