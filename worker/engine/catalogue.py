"""Finds and makes the engine that WARMQ_ENGINE names: a built-in one or an installed plugin."""

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from pkgutil import resolve_name
from typing import Any, ClassVar, Literal

from pydantic import create_model

from contract.setting_names import ENGINE_GROUP
from contract.settings import SettingsError, SourcedSettings, load
from worker.engine import Engine
from worker.engine.spec import EngineSpec, Preflight
from worker.settings import ENGINE_FIELD, WorkerSettings

#: The path of each built-in engine's EngineSpec, by name; only the chosen one is imported.
BUILT_IN = {
    "vllm": "worker.engine.vllm:ENGINE",
    "openai": "worker.engine.openai:ENGINE",
    "triton": "worker.engine.triton:ENGINE",
    "simulated": "worker.engine.simulated:ENGINE",
}


class _Choice(SourcedSettings):
    """WARMQ_ENGINE alone, which is read before the chosen engine's settings."""

    checks_names: ClassVar[bool] = False  # the chosen engine may define more settings

    engine: str = ENGINE_FIELD


def names() -> tuple[str, ...]:
    """Return the allowed values of WARMQ_ENGINE."""
    return tuple(dict.fromkeys([*BUILT_IN, *sorted(entry_points(group=ENGINE_GROUP).names)]))


def find_engine(name: str) -> EngineSpec:
    """Return an engine of `names()`.

    Raises:
        SettingsError: the engine's package cannot be imported, or defines no EngineSpec.
    """
    if name in BUILT_IN:
        entry = EntryPoint(name, BUILT_IN[name], ENGINE_GROUP)
    else:
        entry = next(iter(entry_points(group=ENGINE_GROUP, name=name)))
    try:
        spec = entry.load()
    except (ImportError, AttributeError) as error:
        raise SettingsError(
            f"WARMQ_ENGINE: {name} is {entry.value}, which cannot be imported: {error}"
        ) from error
    if not isinstance(spec, EngineSpec):
        raise SettingsError(f"WARMQ_ENGINE: {name} is not an EngineSpec but {spec!r}")
    return spec


def load_settings(**overrides: Any) -> WorkerSettings:
    """Read a worker's settings, including those of the engine that WARMQ_ENGINE names.

    Raises:
        SettingsError: a variable is wrong; the error names each, its problem and its default.
    """
    name = load(_Choice, **overrides).engine
    if name in names():
        return load(find_engine(name).settings, **overrides)
    # An unknown engine: pydantic reports it, with all other problems of the settings.
    allowed: Any = (Literal[names()], ENGINE_FIELD)
    return load(create_model("KnownEngine", __base__=WorkerSettings, engine=allowed), **overrides)


def make_engine(settings: WorkerSettings) -> Engine:
    """Return the engine that the settings choose. The caller has to build it."""
    engine: Engine = _resolved(find_engine(settings.engine).make)(settings)
    return engine


def attach_engine(settings: WorkerSettings, client: dict[str, Any]) -> Engine:
    """Return an engine that runs requests in a running one. The caller has to build it."""
    attach = find_engine(settings.engine).attach
    assert attach is not None  # noqa: S101 - front_ends_of has refused other engines
    engine: Engine = _resolved(attach)(settings, client)
    return engine


def front_ends_of(settings: WorkerSettings) -> int:
    """Return the number of processes that send requests to the engine.

    Raises:
        SettingsError: WARMQ_FRONT_ENDS is above 1, and the engine accepts only one process.
    """
    spec = find_engine(settings.engine)
    count = settings.front_ends or (spec.front_ends(settings) if spec.attach else 1)
    if count > 1 and spec.attach is None:
        raise SettingsError(
            f"WARMQ_FRONT_ENDS: the engine {settings.engine} takes requests from one process; "
            "leave the variable out, and start more workers on the same queue instead"
        )
    return count


def dry_run(settings: WorkerSettings, preflight: Preflight) -> None:
    """Check a start without loading a model or waiting; add the problems to `preflight`.

    Raises:
        SettingsError: the start would raise the same error.
    """
    front_ends_of(settings)
    engine_dry_run = find_engine(settings.engine).dry_run
    if engine_dry_run is None:
        make_engine(settings).shutdown()
    else:
        _resolved(engine_dry_run)(settings, preflight)


def _resolved(call: Callable[..., Any] | str) -> Callable[..., Any]:
    """Return a function of an EngineSpec; import it if the spec names it as `module:name`."""
    return resolve_name(call) if isinstance(call, str) else call
