"""The table in docs/engine-vllm.md, from results.json."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results.json"
PAGE = RESULTS.parent.parent.parent / "docs" / "engine-vllm.md"
_BLOCK = re.compile(r"<!-- options -->.*?(?=\n\n(?!\|)|\Z)", re.DOTALL)


def table() -> str:
    """Return the rows as Markdown."""
    found = json.loads(RESULTS.read_text())["rows"]
    lines = ["<!-- options -->", "| row | options | on the CPU | seen |", "|---|---|---|---|"]
    return "\n".join([*lines, *map(_line, found)])


def _line(row: dict[str, Any]) -> str:
    seen = [text.replace("|", "\\|") for text in row.get("seen", [row.get("why", "")])]
    args = f"`{row['args']}`".replace("|", "\\|") if row["args"] else "—"
    return f"| {row['option']} | {args} | {row['outcome']} | {'; '.join(seen) or 'answers'} |"


def filled(page: str) -> str:
    """Return the page with the table in its place."""
    text = table()
    return _BLOCK.sub(lambda _: text, page, count=1)


def write_docs() -> None:
    """Write the page."""
    PAGE.write_text(filled(PAGE.read_text()))
