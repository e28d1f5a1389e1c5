"""The error codes that docs/reference/errors.md promises."""

from __future__ import annotations

import re
from functools import cache

from demo.stack import ROOT


@cache
def error_codes() -> dict[str, str]:
    """Return every code of the page's table with what it means."""
    section = (ROOT / "docs/reference/errors.md").read_text().split("\n## Error codes\n")[1]
    table = section.split("\n## ")[0]
    return dict(re.findall(r"^\| `([a-z_]+)` \| (.+) \|$", table, re.MULTILINE))
