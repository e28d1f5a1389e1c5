"""What workers have announced of themselves, the parts of one worker as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

#: Workers announce themselves every second; one silent for so long is not counted.
WORKER_SILENT_S = 15.0
#: What the parts of a worker announce of themselves alone.
SUMMED = ("in_flight", "limit", "slots")


def is_alive(worker: Mapping[str, Any]) -> bool:
    """Whether an announcement of `Reads.announcements` is fresh, and not its worker's last."""
    return bool(worker["silent_s"] < WORKER_SILENT_S and worker.get("state") != "stopped")


def protocol_of(worker: Mapping[str, Any]) -> int:
    """Return the protocol that a worker announced; those before it had a number announce none."""
    told = worker.get("protocol")
    return told if isinstance(told, int) else 1


def read_announcements(raw: Mapping[bytes, bytes], now_s: float) -> list[dict[str, Any]]:
    """Return what workers have announced, each `silent_s` old at `now_s` by Redis' clock."""
    found = []
    for name, record in raw.items():
        at_ms, _, state = record.partition(b"\0")
        try:
            silent_s = abs(now_s - int(at_ms) / 1000)  # the clock may have stepped back
            worker = {"id": name.decode(), "silent_s": silent_s} | orjson.loads(state)
        except (ValueError, TypeError):
            continue
        if isinstance(worker.get("queue"), str):
            found.append(worker)
    return _whole(found)


def _whole(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Make one of a worker's parts: several processes of it may feed one engine."""
    parts: dict[str, list[dict[str, Any]]] = {}
    for each in found:
        if isinstance(worker := each.get("part_of"), str) and is_alive(each):
            parts.setdefault(worker, []).append(each)
    whole = [each for each in found if "part_of" not in each]
    for worker in whole:
        if others := parts.get(worker["id"]):
            for name in SUMMED:
                told = (each.get(name) for each in (worker, *others))
                worker[name] = sum(number for number in told if isinstance(number, int))
            worker.update(_counted([worker, *others]))
    return whole


def _counted(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return `done` of some parts together, and `deaths` of the engine that all of them feed.

    Absent where none tells it, as workers of older versions.
    """
    told = [done for part in parts if isinstance(done := part.get("done"), dict)]
    sums = Counter[str]()
    for done in told:
        sums.update({name: count for name, count in done.items() if isinstance(count, int)})
    deaths = [count for part in parts if isinstance(count := part.get("deaths"), int)]
    return ({"done": dict(sums)} if told else {}) | ({"deaths": max(deaths)} if deaths else {})
