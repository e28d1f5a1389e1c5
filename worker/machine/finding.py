"""One problem of a set-up and what to do about it."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from contract.settings import SettingsError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Finding:
    """A fatal one keeps the engine from starting, or would make it fail; others are warnings."""

    problem: str
    remedy: str
    fatal: bool = True

    def __str__(self) -> str:
        return f"{self.problem}. {self.remedy}."


def refuse_fatal(found: Iterable[Finding]) -> None:
    """Log the warnings.

    Raises:
        SettingsError: naming every fatal problem and its remedy.
    """
    found = list(found)
    if fatal := [str(finding) for finding in found if finding.fatal]:
        raise SettingsError("\n".join(fatal))
    for finding in found:
        log.warning("%s", finding, extra={"action": "start_warning"})
