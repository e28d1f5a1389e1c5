"""The Lua protocol: each script is common.lua plus its own file."""

from __future__ import annotations

from functools import cache
from importlib.resources import files


@cache
def source(name: str) -> str:
    """Return the full text of one script, for example `source("pop")`."""
    folder = files("contract") / "lua"
    return (folder / "common.lua").read_text() + "\n" + (folder / f"{name}.lua").read_text()
