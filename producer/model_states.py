"""Describes the models of workers with WARMQ_MODELS: loaded or not, waiting requests, swaps."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from contract.redis.announced_models import (
    Swap,
    can_load,
    failure_of,
    has_loaded,
    mean_load_s,
    models_of,
    swaps_of,
)
from producer.queue_workers import clock_text

Worker = Mapping[str, Any]


class ModelState(NamedTuple):
    """One model of workers with several models.

    `loaded` workers have loaded the model, `able` ones can load it, and `waiting` requests wait for
    it. `why` is the reason of a worker that cannot load the model; '' without such a worker.
    """

    model: str
    queue: str
    loaded: int
    able: int
    waiting: int
    why: str

    @property
    def text(self) -> str:
        """`loaded`, `not loaded` or `cannot be loaded`."""
        if self.loaded:
            return "loaded"
        return "not loaded" if self.able else "cannot be loaded"


class SwapOf(NamedTuple):
    """A swap, and the id of its worker."""

    worker: str
    swap: Swap


def model_states(alive: Sequence[Worker], waiting: Mapping[str, int]) -> list[ModelState]:
    """Return the state of each model of workers with several models, by name.

    `waiting` has the number of waiting requests by queue.
    """
    queues = {model: queue for worker in alive for model, queue in models_of(worker).items()}
    return [
        ModelState(
            model,
            queue,
            sum(has_loaded(worker, queue) for worker in alive),
            sum(can_load(worker, queue) for worker in alive),
            waiting.get(queue, 0),
            next(filter(None, (failure_of(worker, queue) for worker in alive)), ""),
        )
        for model, queue in sorted(queues.items())
    ]


class PlannedSwaps(NamedTuple):
    """The swaps that a file's requests and the requests that wait already need.

    `models` must still be loaded; `unloadable` are models of the file that no worker can load.
    `seconds` is the sum of the mean times of loading `models`; None if one was not loaded yet.
    """

    models: list[ModelState]
    unloadable: list[ModelState]
    seconds: float | None


def planned_swaps(
    alive: Sequence[Worker], queues: Collection[str], waiting: Mapping[str, int]
) -> PlannedSwaps | None:
    """Return the swaps that requests of `queues` need; None without workers of several models."""
    with_several = [one for one in alive if not set(models_of(one).values()).isdisjoint(queues)]
    if not with_several:
        return None
    needed = [
        state
        for state in model_states(with_several, waiting)
        if (state.queue in queues or state.waiting)
        and not any(has_loaded(worker, state.queue) for worker in alive)
    ]
    models = [state for state in needed if state.able]
    loads = [mean_load_s(with_several, state.model) for state in models]
    measured = [seconds for seconds in loads if seconds is not None]
    unloadable = [state for state in needed if not state.able and state.queue in queues]
    return PlannedSwaps(models, unloadable, sum(measured) if len(measured) == len(loads) else None)


def last_swaps(alive: Iterable[Worker], most: int) -> list[SwapOf]:
    """Return the last swaps of all workers, at most `most`, the newest first."""
    swaps = [SwapOf(str(worker["id"]), swap) for worker in alive for swap in swaps_of(worker)]
    return sorted(swaps, key=lambda one: -one.swap.at_s)[:most]


def swap_text(swap: Swap) -> str:
    """Return a text with a swap's models, age, result, duration and reason."""
    ago = clock_text(max(0.0, time.time() - swap.at_s))
    what = f"from {swap.before} to {swap.model}" if swap.before else f"to {swap.model}"
    end = "which failed" if swap.failed else "done"
    return f"{what}, {ago} ago, {end} after {swap.seconds:g} s: {swap.why}"
