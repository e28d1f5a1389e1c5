"""Reads what workers announce of servers that they share with people.

Fields that cannot be read are passed over.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

#: Largest number that is read, for example tokens.
_MOST = 1e15


class SharedServer(NamedTuple):
    """A server that workers share with people, as its leader has measured it.

    `in_flight` requests of all `workers` are in the server, at most `limit`; `why` is the reason of
    the limit. `in_server` has those of all clients. People feel `ttft_ms` to the first token and
    `itl_ms` between tokens. `tokens_today` were written for the workers (UTC). None: unknown.
    """

    server: str
    in_flight: int
    in_server: int | None
    limit: int
    workers: int
    why: str
    paused: bool
    ttft_ms: float | None
    ttft_ms_target: float | None
    itl_ms: float | None
    itl_ms_target: float | None
    tokens_today: int


def shared_servers(workers: Iterable[Mapping[str, Any]]) -> list[SharedServer]:
    """Return each server once, by name, from the latest announcement of its workers."""
    found: dict[str, SharedServer] = {}
    for worker in sorted(workers, key=lambda one: float(one["silent_s"]), reverse=True):
        rows = worker.get("shared")
        for row in rows if isinstance(rows, list) else ():
            if isinstance(row, dict) and isinstance(name := row.get("server"), str):
                found[name] = _read(name, row)
    return [found[name] for name in sorted(found)]


def _read(name: str, row: Mapping[str, Any]) -> SharedServer:
    in_flight, in_server = _count(row.get("in_flight")), _number(row.get("in_server"))
    return SharedServer(
        name,
        in_flight,
        # Its metrics may be a second old.
        None if in_server is None else max(in_flight, int(in_server)),
        _count(row.get("limit")),
        _count(row.get("workers")),
        str(row.get("why") or ""),
        row.get("paused") is True,
        _number(row.get("ttft_ms")),
        _number(row.get("ttft_ms_target")),
        _number(row.get("itl_ms")),
        _number(row.get("itl_ms_target")),
        _count(row.get("tokens_today")),
    )


def _count(value: object) -> int:
    return int(_number(value) or 0)


def _number(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return value if math.isfinite(value) and 0 <= value < _MOST else None
