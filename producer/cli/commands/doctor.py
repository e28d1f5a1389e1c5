"""`producer doctor`."""

from collections.abc import Sequence
from pathlib import Path

import click

from producer.cli import options, show
from producer.cli.context import Exit
from producer.cli.doctor.examine import examine
from producer.cli.doctor.finding import Finding
from producer.cli.findings import MARKS, text_and_remedy
from producer.cli.progress import counted, tell


@click.command("doctor")
@click.option(
    "--worker", is_flag=True, help="Redis' user must have the rights of a worker too: try them."
)
@options.as_json
def command(*, worker: bool, as_json: bool) -> Exit:
    """Look for what is in the way: Redis, workers, queues, disk, settings.

    Nothing is changed. Each line begins with `ok`, with `--` for what you may want
    to change, or with `!!` for what stops the work; behind the colon is the remedy.
    Ends with 0 without a `!!`, with 1 with one, with 3 if Redis cannot be used.
    """
    found = []
    for finding in examine(_current_folder(), worker=worker):
        found.append(finding)
        if not as_json:
            text, remedy = text_and_remedy(finding)
            line = f"{MARKS[finding.level]}  {finding.area:<8}  {text}"
            click.echo(show.harmless(f"{line}: {remedy}" if remedy else line))
    problems = sum(finding.level == "problem" for finding in found)
    if as_json:
        show.put_json(_document(found))
    else:
        tell(counted(problems, "problem"))
    if any(finding.code == "redis_unusable" for finding in found):
        return Exit.UNREACHABLE
    return Exit.SOME_FAILED if problems else Exit.ALL_WELL


def _current_folder() -> Path | None:
    try:
        return Path.cwd()
    except FileNotFoundError:  # somebody has deleted it
        return None


def _document(found: Sequence[Finding]) -> dict[str, object]:
    return {
        "object": "warmq.doctor",
        "healthy": all(finding.level != "problem" for finding in found),
        "findings": [_finding_json(finding) for finding in found],
    }


def _finding_json(finding: Finding) -> dict[str, object]:
    text, remedy = text_and_remedy(finding)
    return {
        "area": finding.area,
        "code": finding.code,
        "level": finding.level,
        "text": text,
        "remedy": remedy or None,
        "facts": finding.facts,
    }
