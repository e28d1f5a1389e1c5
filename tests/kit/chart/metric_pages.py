"""The series that docs/reference/observing.md lists."""

from __future__ import annotations

import re

from demo.stack import ROOT


def documented(section: str) -> set[str]:
    """Return the series of one section's table."""
    text = (ROOT / "docs/reference/observing.md").read_text()
    (table,) = re.findall(rf"### {re.escape(section)}\n(.*?)(?=\n##|\Z)", text, re.DOTALL)
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`(warmq_\w+)`", row)}


def series_of(sample: str) -> str:
    """Return the series that a sample belongs to: a histogram has several."""
    return re.sub(r"(?<=_seconds)_(bucket|count|sum)$", "", sample)
