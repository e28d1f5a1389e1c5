"""The Lua protocol: each script is what all share plus its own file."""

from __future__ import annotations

from functools import cache
from importlib.resources import files


@cache
def source(name: str) -> str:
    """Return the full text of one script, for example `source("pop")`."""
    folder = files("contract") / "lua"
    parts = ("common", "message", "leases", name)
    return "\n".join((folder / f"{part}.lua").read_text() for part in parts)
