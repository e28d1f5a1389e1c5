"""A problem of a set-up and its remedy."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from contract.settings import SettingsError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem: a warning, or fatal to the engine or its start."""

    problem: str
    remedy: str
    fatal: bool = True

    def __str__(self) -> str:
        return f"{self.problem}. {self.remedy}."


def warning(problem: str, remedy: str) -> Finding:
    """Return a finding that is not fatal."""
    return Finding(problem, remedy, fatal=False)


class Refused(SettingsError):
    """The fatal problems of an engine, in `found`."""

    def __init__(self, found: list[Finding]) -> None:
        super().__init__("\n".join(map(str, found)))
        self.found = found


def refuse_fatal(found: Iterable[Finding]) -> None:
    """Log the warnings.

    Raises:
        Refused: naming every fatal problem and its remedy.
    """
    found = list(found)
    if fatal := [finding for finding in found if finding.fatal]:
        raise Refused(fatal)
    for finding in found:
        log.warning("%s", finding, extra={"action": "start_warning"})
