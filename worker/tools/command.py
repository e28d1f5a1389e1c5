"""Runs the click commands of `python -m worker.…`, and returns their exit status."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from contract.settings import SettingsError
from worker.machine.finding import Finding

#: Settings of click that all commands share.
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
#: The option --version.
version_option = click.version_option(package_name="warmq", message="warmq %(version)s")
#: The type of an argument that is a folder.
FOLDER = click.Path(path_type=Path)
#: Exit statuses: wrong usage or settings, and Ctrl-C.
USAGE, INTERRUPTED = 2, 130


def run(command: click.Command, argv: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit status: 2 for wrong usage or settings."""
    try:
        status = command.main(argv, f"python -m worker.{command.name}", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        status = USAGE
    except SettingsError as error:
        click.echo(error, err=True)
        status = USAGE
    except click.Abort:  # Ctrl-C
        status = INTERRUPTED
    return int(status or 0)


def problem_lines(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield each problem with its remedy in a second line; fatal problems come first."""
    for finding in sorted(findings, key=lambda finding: not finding.fatal):
        yield f"{'problem' if finding.fatal else 'note'}: {finding.problem}\n  do: {finding.remedy}"
