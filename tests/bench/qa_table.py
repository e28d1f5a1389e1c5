"""The table of docs/performance.md for the tutorial's experiment on this machine."""

from __future__ import annotations

from typing import Any

import report

BEGIN, END = "<!-- qa: written by `run.py --write-docs` -->", "<!-- end of qa -->"
NAMES = {
    "one": "one question after another",
    "warmq": "warmq",
    "ngram": "warmq, n-gram speculation",
    "draft": "warmq, a draft model",
    "tp2": "warmq, tensor parallel 2",
    "pp2": "warmq, two pipeline stages",
}


def table(found: dict[str, Any]) -> list[str]:
    """Return one row a way; a way that cannot run here says why."""
    count = found["questions"]
    lines = [
        f"The same on this CPU with {found['shape']}, float32, whose answers can be judged; one "
        f"run each, {found['machine']['date'][:10]}:",
        "",
        "| way | seconds for the file | ÷ warmq | right | same text as warmq |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, way in found["ways"].items():
        if "seconds" in way:
            cells = [f"{way['seconds_for_the_file']:.1f}", f"{way['to_warmq']:.2f}"]
            cells += [f"{way[key]} of {count}" for key in ("right", "same_as_warmq")]
        else:
            cells = ["refused", "", "", ""]
        lines.append(f"| {NAMES[name]} | " + " | ".join(cells) + " |")
    return lines


def put_in(page: str) -> str:
    """Return the page with the table between its marks; unchanged where nothing was measured."""
    found = report.load("qa")
    if found is None:
        return page
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n" + "\n".join(table(found)) + f"\n\n{END}{tail}"
