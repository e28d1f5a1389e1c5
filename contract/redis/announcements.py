"""Reads workers' announcements, and adds each worker's front ends to its numbers.

An announcement is a worker's state and load, which it writes into Redis every second
(worker/drain/announcement.py). Further front ends of a worker write their own.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import orjson

from contract.redis.announced_models import adapters_of, models_of

#: Seconds without a new announcement after which a worker counts as dead.
WORKER_SILENT_S = 15.0
#: Age in seconds from which an announcement is overdue. Workers write one every second; a busy
#: machine may delay it, and Redis's time is read in whole seconds.
OVERDUE_S = 2.5
#: The beginning of a worker's announced reason (`why`) while it waits for its servers.
WAITS_FOR = "waits for "
#: Model name of a worker of the default queue that announces no model.
UNNAMED = "default"
#: Numbers that each front end announces for itself only; the worker's numbers are their sums.
SUMMED = ("in_flight", "limit", "slots")


def queues_of(worker: Mapping[str, Any]) -> list[str]:
    """Return the queues that a worker serves; the first is that of the loaded model."""
    return list(dict.fromkeys([worker["queue"], *models_of(worker).values()]))


def is_alive(worker: Mapping[str, Any]) -> bool:
    """Return whether a worker's announcement is recent, and is not that of its end.

    While Redis was away, no worker could announce itself: only the time since then counts.
    """
    silent_s = min(worker["silent_s"], worker.get("redis_up_s", worker["silent_s"]))
    return bool(silent_s < WORKER_SILENT_S and worker.get("state") != "stopped")


def is_silent(worker: Mapping[str, Any]) -> bool:
    """Return whether a living worker's next announcement is overdue, and Redis was not away."""
    return bool(worker.get("overdue")) and "redis_up_s" not in worker


def protocol_of(worker: Mapping[str, Any]) -> int:
    """Return the protocol (contract/version.py) of a worker; 1 if it has announced none."""
    protocol = worker.get("protocol")
    return protocol if isinstance(protocol, int) else 1


def model_name(worker: Mapping[str, Any]) -> str:
    """Return the name of a worker's model, never a folder's path; '' if it announces none."""
    for name in (worker.get("name"), worker.get("model")):
        if isinstance(name, str) and name:
            path = PurePath(name)  # a worker of 0.2.0 announces only the folder's path
            return path.name if path.is_absolute() else name
    return ""


def names_of(worker: Mapping[str, Any], base: str) -> Iterator[tuple[str, str]]:
    """Yield the names of a worker's models and adapters, each with its queue.

    `base` is the default queue; the queues of named models begin with it. Of pairs with the same
    name the last one counts: a model comes before an adapter, a loaded one before one that is not.
    """
    queue, adapters = worker["queue"], worker.get("adapters")
    for name, its_queue in adapters_of(worker):
        if its_queue.startswith(f"{base}."):
            yield name, its_queue
    for name in own_names(worker, base):
        yield name, queue
    for adapter in adapters if isinstance(adapters, list) else ():
        yield str(adapter), queue
    for more in queues_of(worker)[1:]:  # of models that are not loaded now
        if more.startswith(f"{base}."):
            yield more.removeprefix(f"{base}."), more


def own_names(worker: Mapping[str, Any], base: str) -> Iterator[str]:
    """Yield the names of a worker's base model."""
    if worker["queue"] != base:
        yield worker["queue"].removeprefix(f"{base}.")
    else:
        yield model_name(worker) or UNNAMED
        yield from paths_of(worker)


def paths_of(worker: Mapping[str, Any]) -> Iterator[str]:
    """Yield the path of a worker's model if the model has another name."""
    model, name = worker.get("model"), model_name(worker)
    if name and isinstance(model, str) and model != name:
        yield model


def read_announcements(
    raw: Mapping[bytes, bytes], now_s: float, *, merged: bool = True
) -> list[dict[str, Any]]:
    """Return the announcements; `silent_s` is the age of each at `now_s`, Redis's time.

    `overdue`: the next one did not come, although the worker does not count as dead yet. If
    `merged`, front ends are added to the announcements of their workers.
    """
    found = []
    for name, record in raw.items():
        at_ms, _, state = record.partition(b"\0")
        try:
            age_s = now_s - int(at_ms) / 1000  # below 0 if Redis's clock has stepped back
            read = {"id": name.decode(), "silent_s": abs(age_s), "overdue": age_s >= OVERDUE_S}
            worker = read | orjson.loads(state)
        except (ValueError, TypeError):
            continue
        if isinstance(worker.get("queue"), str):
            found.append(worker)
    return _with_front_ends(found) if merged else found


def _with_front_ends(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the front ends of each worker to its own announcement."""
    front_ends: dict[str, list[dict[str, Any]]] = {}
    for each in found:
        if isinstance(worker := each.get("part_of"), str) and is_alive(each):
            front_ends.setdefault(worker, []).append(each)
    whole = [each for each in found if "part_of" not in each]
    for worker in whole:
        if peers := front_ends.get(worker["id"]):
            parts = [worker, *peers]
            for name in SUMMED:
                numbers = (each.get(name) for each in parts)
                worker[name] = sum(number for number in numbers if isinstance(number, int))
            worker.update(_sums_of_counts(parts))
    return whole


def _sums_of_counts(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums of `done`, and the `deaths` of the shared engine, if announced."""
    found: dict[str, Any] = {}
    if done := [done for part in parts if isinstance(done := part.get("done"), dict)]:
        sums = Counter[str]()
        for counts in done:
            sums.update({name: n for name, n in counts.items() if isinstance(n, int)})
        found["done"] = dict(sums)
    if deaths := [count for part in parts if isinstance(count := part.get("deaths"), int)]:
        found["deaths"] = max(deaths)
    return found
