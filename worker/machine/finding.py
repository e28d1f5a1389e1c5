"""Defines Finding: a problem of the set-up, and its remedy."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from contract.settings import SettingsError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem, with its remedy. A fatal one prevents the start, any other is a warning."""

    problem: str
    remedy: str
    fatal: bool = True

    def __str__(self) -> str:
        return f"{self.problem}. {self.remedy}."


def warning(problem: str, remedy: str) -> Finding:
    """Return a finding that is not fatal."""
    return Finding(problem, remedy, fatal=False)


class Refused(SettingsError):
    """The fatal problems of a start; `findings` has one Finding for each."""

    def __init__(self, findings: list[Finding]) -> None:
        super().__init__("\n".join(map(str, findings)))
        self.findings = findings


def refuse_fatal(findings: Iterable[Finding]) -> None:
    """Log warnings, unless there is a fatal problem.

    Raises:
        Refused: names every fatal problem and its remedy.
    """
    findings = list(findings)
    if fatal := [finding for finding in findings if finding.fatal]:
        raise Refused(fatal)
    for finding in findings:
        log.warning("%s", finding, extra={"action": "start_warning"})
