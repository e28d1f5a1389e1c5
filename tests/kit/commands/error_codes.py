"""The error codes that docs/architecture.md promises."""

from __future__ import annotations

import re
from functools import cache

from demo.stack import ROOT


@cache
def error_codes() -> dict[str, str]:
    """Return every code of the page's table with what it means."""
    section = (ROOT / "docs" / "architecture.md").read_text().split("\n## Errors\n")[1]
    table = section.split("\n## ")[0]
    return dict(re.findall(r"^\| `([a-z_]+)` \| (.+) \|$", table, re.MULTILINE))
