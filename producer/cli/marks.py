"""Defines the severities of findings and stalls, with their marks."""

from typing import Literal

from producer.stalls import Stall

#: Severity of a finding. A problem stops the work, now or later; a remark does not.
Level = Literal["ok", "remark", "problem"]
#: The mark of a severity at the beginning of a line, in `doctor` and `status`.
MARKS: dict[Level, str] = {"ok": "ok", "remark": "--", "problem": "!!"}


def level_of(stall: Stall) -> Level:
    """Return the severity of a stall."""
    return "remark" if stall.passing else "problem"
