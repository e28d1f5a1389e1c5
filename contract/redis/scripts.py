"""The Lua scripts of contract/lua: each is what all share plus its own file."""

import hashlib
from functools import cache
from importlib.resources import files


@cache
def source(name: str) -> str:
    """Return the full text of one script, for example `source("pop")`."""
    folder = files("contract") / "lua"
    parts = ("common", "message", "turns", "charges", "leases", name)
    return "\n".join((folder / f"{part}.lua").read_text() for part in parts)


@cache
def sha(name: str) -> str:
    """Return the SHA-1 in hex by which Redis knows a script that was loaded."""
    return hashlib.sha1(source(name).encode(), usedforsecurity=False).hexdigest()
