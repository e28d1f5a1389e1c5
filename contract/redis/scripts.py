"""The Lua scripts: each is what all share, in contract/lua, plus its own file."""

import hashlib
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from importlib.util import find_spec

#: Packages that have scripts, in a folder `lua`: contract those that several of them run, each of
#: the others its own. No two scripts have one name.
PACKAGES = ("contract", "worker", "producer", "gateway")
#: What stands in front of every script.
SHARED = ("common", "message", "turns", "charges", "leases")


@cache
def source(name: str) -> str:
    """Return the full text of one script, for example `source("pop")`."""
    folder = files("contract") / "lua"
    parts = [folder / f"{part}.lua" for part in SHARED]
    return "\n".join(part.read_text() for part in (*parts, _own(name)))


def _own(name: str) -> Traversable:
    for package in PACKAGES:
        spec = find_spec(package)  # an image may have the packages of one side alone
        if spec is not None and spec.origin is not None:
            file = files(package) / "lua" / f"{name}.lua"
            if file.is_file():
                return file
    raise LookupError(f"no script is called {name}")


@cache
def sha(name: str) -> str:
    """Return the SHA-1 in hex by which Redis knows a script that was loaded."""
    return hashlib.sha1(source(name).encode(), usedforsecurity=False).hexdigest()
