"""The shipped model under three names, with chat templates by which their answers differ.

A template that writes more makes every prompt longer by the same number of tokens, so the counts
of prompt tokens tell which model has answered.
"""

from __future__ import annotations

from pathlib import Path

from demo.stack import CPU_ENGINE_ARGS, MODEL

#: What each model's template writes before the prompt; the shortest first.
BEFORE = {"short": "", "middle": "one two three ", "long": "one two three four five six seven "}


def entries_in(folder: Path) -> dict[str, dict[str, str]]:
    """Return the entries of WARMQ_MODELS; their templates are files in `folder`."""
    entries: dict[str, dict[str, str]] = {}
    for name, before in BEFORE.items():
        template = folder / f"{name}.jinja"
        template.write_text(before + "{% for m in messages %}{{ m['content'] }}{% endfor %}")
        args = f"{CPU_ENGINE_ARGS} --chat-template {template}"
        entries[name] = {"path": str(MODEL), "engine_args": args}
    return entries
