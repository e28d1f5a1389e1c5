"""Chooses where the engine of each model is between two stays: asleep, or stopped.

An engine that sleeps keeps its processes, and its weights in the machine's memory, so that a swap
takes about a second. An engine that is stopped has to start again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from worker.drain.keeper import EngineKeeper
from worker.engine.catalogue import find_engine
from worker.engine.spec import Sleep
from worker.machine import devices
from worker.models.asleep import Asleep
from worker.models.config import Model
from worker.settings import WorkerSettings

#: The share of the machine's free memory that the weights of sleeping engines may take.
HOST_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Residence:
    """Where a model's engine is between two stays, and why.

    `sleep` is None if the engine is stopped. `settings` are those that leave memory for sleeping
    engines; None: the model's own. `loaded_with` is the model with which this one is loaded and
    unloaded.
    """

    sleep: Sleep | None
    why: str
    settings: WorkerSettings | None = None
    loaded_with: str | None = None

    def __str__(self) -> str:
        if self.loaded_with:
            return f"loaded together with {self.loaded_with}: {self.why}"
        return f"{'asleep' if self.sleep else 'stopped'} between its stays: {self.why}"

    def keeper(self, model: str) -> EngineKeeper:
        """Return a keeper of the model's engine."""
        return Asleep(model, self.sleep.device_bytes) if self.sleep else EngineKeeper()


def choose(plans: Mapping[str, Sleep | str], free: int) -> dict[str, Residence]:
    """Choose the residence of each model's engine, the first models first.

    `plans` has how an engine can sleep, or why it cannot. `free` is the machine's free memory in
    bytes, which the sleeping engines share.
    """
    room = int(free * HOST_SHARE)
    chosen, taken = {}, 0
    for model, plan in plans.items():
        if isinstance(plan, str):
            chosen[model] = Residence(None, plan)
        elif taken + plan.host_bytes > room:
            why = (
                f"its weights, {_gib(plan.host_bytes)} GiB, do not fit into the memory with the "
                f"{_gib(taken)} GiB of other models: {_gib(room)} GiB may be used"
            )
            chosen[model] = Residence(None, why, plan.settings)
        else:
            taken += plan.host_bytes
            why = f"{plan.why}; {_gib(taken)} of {_gib(room)} GiB of memory are planned so far"
            chosen[model] = Residence(plan, why, plan.settings)
    return chosen


def with_residences(models: Mapping[str, Model]) -> tuple[dict[str, Model], dict[str, Residence]]:
    """Return the models with the settings of their residences, and the residences."""
    if len(models) < 2:
        return dict(models), {name: Residence(None, "it is the only model") for name in models}
    together = _together(models)
    mains = {each.loaded_with for each in together.values()}
    plans: dict[str, Sleep | str] = {
        name: f"it is loaded together with {' and '.join(_names_with(name, together))}"
        if name in mains else _plan(each, len(models) - 1)
        for name, each in models.items()
    }  # fmt: skip
    chosen = choose(plans, devices.machine().free)
    for name, found in together.items():
        chosen[name] = found if found.loaded_with else replace(
            chosen[name], why=f"{found.why}; {chosen[name].why}"
        )  # fmt: skip
    changed = {
        name: replace(each, settings=chosen[name].settings or each.settings)
        for name, each in models.items()
    }
    return changed, chosen


def _together(models: Mapping[str, Model]) -> dict[str, Residence]:
    """Return the residence of each model with a `with`; the engine computes whether all fit."""
    found: dict[str, Residence] = {}
    for name, each in models.items():
        if (main := each.entry.loaded_with) is None:
            continue
        members = [main, *_names_with(main, found), name]
        settings = [models[one].settings for one in members]
        fits, why = find_engine(each.settings.engine).together(settings)
        found[name] = Residence(None, why, loaded_with=main if fits else None)
    return found


def _names_with(main: str | None, found: Mapping[str, Residence]) -> list[str]:
    return [name for name, each in found.items() if each.loaded_with == main]


def _plan(model: Model, other_models: int) -> Sleep | str:
    return find_engine(model.settings.engine).sleep(model.settings, other_models)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}"
