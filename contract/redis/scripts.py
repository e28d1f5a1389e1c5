"""The Lua protocol: each script is what all share plus its own file."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import redis

from contract.redis.connect import translated


@cache
def source(name: str) -> str:
    """Return the full text of one script, for example `source("pop")`."""
    folder = files("contract") / "lua"
    parts = ("common", "message", "leases", name)
    return "\n".join((folder / f"{part}.lua").read_text() for part in parts)


class ScriptClient:
    """A client that runs the scripts. Raises StoreUnavailable where Redis cannot be used."""

    def __init__(self, client: redis.Redis) -> None:
        # redis-py types every reply as bytes or str or more; these clients never decode.
        self.redis: Any = client
        self._scripts: dict[str, Any] = {}

    def _run(self, name: str, *args: Any) -> Any:
        script = self._scripts.get(name)
        if script is None:
            script = self._scripts[name] = self.redis.register_script(source(name))
        with translated():
            return script(args=args)
