"""Reads what workers of several models announce: loaded models, swaps, models that fail to load.

A worker of one model announces no such fields. Fields that cannot be read are passed over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Worker = Mapping[str, Any]
#: Largest number that is read, for example milliseconds since 1970.
_MOST = 1e13


class Swap(NamedTuple):
    """A load of `model` by a worker that had `before` loaded until then, '' for none.

    `at_s` is in seconds since 1970, `seconds` the load's duration; `failed`: the model could not be
    loaded.
    """

    before: str
    model: str
    why: str
    at_s: float
    seconds: float
    failed: bool


class Unloadable(NamedTuple):
    """A worker's failed tries to load the model of `queue`; `why` is the reason of the last.

    It tries again at `again_at_s`, in seconds since 1970, if a request waits then.
    """

    queue: str
    why: str
    tries: int
    again_at_s: float = 0.0


class Loads(NamedTuple):
    """The numbers of successful and failed loads of a model, and all successful loads' seconds."""

    loaded: int
    seconds: float
    failed: int


def models_of(worker: Worker) -> dict[str, str]:
    """Return the queue of each model of a worker by name, {} for a worker of one model."""
    models = worker.get("models")
    if not isinstance(models, dict):
        return {}
    return {name: queue for name, queue in models.items() if isinstance(queue, str)}


def adapters_of(worker: Worker) -> list[tuple[str, str]]:
    """Return the adapters of a worker's models, loaded or not, each with its model's queue."""
    found, pairs = _dict(worker.get("model_adapters")), []
    for model, queue in models_of(worker).items():
        names = found.get(model)
        for name in names if isinstance(names, list) else ():
            if isinstance(name, str):
                pairs.append((name, queue))
    return pairs


def has_loaded(worker: Worker, queue: str) -> bool:
    """Return whether the queue's model is loaded in a worker, or is being loaded."""
    return bool(worker["queue"] == queue and worker.get("state") != "swapping")


def unloadable(worker: Worker) -> dict[str, Unloadable]:
    """Return the models that a worker could not load, by name."""
    failed = _dict(worker.get("unloadable"))
    return {
        name: Unloadable(queue, str(one.get("why") or "unknown reason"), int(_number(one, "tries")),
                         _number(one, "again_at") / 1000)
        for name, queue in models_of(worker).items()
        if isinstance(one := failed.get(name), dict)
    }  # fmt: skip


def sleep_failed(worker: Worker) -> dict[str, str]:
    """Return by model why its engine no longer sleeps while another model is loaded."""
    found, models = _dict(worker.get("sleep_failed")), models_of(worker)
    return {model: str(why) for model, why in found.items() if model in models}


def failure_of(worker: Worker, queue: str) -> str:
    """Return why a worker cannot load a queue's model, '' if it can or has not tried."""
    return next((one.why for one in unloadable(worker).values() if one.queue == queue), "")


def unloadable_of(workers: Iterable[Worker], queue: str) -> Unloadable | None:
    """Return the failure of the worker that tries first again, if none can load a queue's model."""
    able = [one for one in workers if one["queue"] == queue or queue in models_of(one).values()]
    failures = [one for each in able for one in unloadable(each).values() if one.queue == queue]
    if not failures or len(failures) < len(able):
        return None
    return min(failures, key=lambda one: one.again_at_s)


def can_load(worker: Worker, queue: str) -> bool:
    """Return whether a worker has another model loaded, but may load the queue's."""
    mine = queue in models_of(worker).values()
    return mine and not has_loaded(worker, queue) and not failure_of(worker, queue)


def swaps_of(worker: Worker) -> list[Swap]:
    """Return a worker's last swaps, the newest last."""
    found = worker.get("swaps")
    return [
        Swap(str(one.get("from") or ""), str(one.get("to")), str(one.get("why") or ""),
             _number(one, "at") / 1000, _number(one, "seconds"), bool(one.get("failed")))
        for one in (found if isinstance(found, list) else ())
        if isinstance(one, dict)
    ]  # fmt: skip


def loads_of(worker: Worker) -> dict[str, Loads]:
    """Return how often a worker has loaded each of its models since its start."""
    found = _dict(worker.get("loads"))
    return {
        name: Loads(int(_number(one, "loaded")), _number(one, "seconds"),
                    int(_number(one, "failed")))
        for name in models_of(worker)
        if isinstance(one := found.get(name), dict)
    }  # fmt: skip


def mean_load_s(workers: Iterable[Worker], model: str) -> float | None:
    """Return the mean seconds in which workers have loaded a model, None if none has."""
    found = [loads[model] for one in workers if model in (loads := loads_of(one))]
    count = sum(one.loaded for one in found)
    return sum(one.seconds for one in found) / count if count else None


def load_seconds(workers: Sequence[Worker], queues: Iterable[str]) -> float:
    """Return the seconds to load the models of queues that no worker has loaded, one by one.

    A model that was not loaded yet counts as 0.
    """
    missing = {q for q in queues if not any(has_loaded(worker, q) for worker in workers)}
    models = {m for one in workers for m, queue in models_of(one).items() if queue in missing}
    return sum(mean_load_s(workers, model) or 0.0 for model in models)


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(fields: Mapping[str, Any], name: str) -> float:
    value = fields.get(name)
    return min(max(value, 0.0), _MOST) if isinstance(value, int | float) else 0.0
