"""Reads WARMQ_MODELS: the models between which one worker swaps, and the limits of each."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import orjson
from pydantic import BaseModel, BeforeValidator, Field, TypeAdapter, ValidationError

from contract.durations import duration_s
from contract.naming import did_you_mean
from contract.settings import SettingsError, Text
from worker.models.policy import Terms, default_stay_s
from worker.settings import Name, WorkerSettings

#: Most models of one worker, because it reads each second what waits for each of them.
MOST_MODELS = 64
#: The assumed seconds of a swap to a model, until a swap to it was measured.
ASSUMED_SWAP_S = 20.0


def _as_seconds(value: object) -> object:
    if isinstance(value, str):
        seconds = duration_s(value) if len(value) < 50 else None
        if seconds is None:
            raise ValueError('must be a duration such as "90s", "10m" or "1h"')
        return seconds
    return value


_NAME: TypeAdapter[str] = TypeAdapter(Annotated[Name, Field(min_length=1, max_length=200)])
_Duration = Annotated[float, BeforeValidator(_as_seconds), Field(ge=0, le=86400 * 7)]


class ModelEntry(BaseModel, extra="forbid", frozen=True):
    """One model of WARMQ_MODELS; `loaded_with` is the field `with`."""

    path: Text | None = None
    engine_args: str = ""
    adapters: Text | None = None
    min_stay: _Duration | None = None
    max_wait: _Duration = 600.0
    max_online_wait: _Duration = 30.0
    loaded_with: str | None = Field(None, alias="with")


@dataclass(frozen=True, slots=True)
class Model:
    """A model: its name, the settings of a worker that serves it alone, and its entry."""

    name: str
    settings: WorkerSettings
    entry: ModelEntry

    def terms(self, swap_s: float | None, slot_rate: float = 0.0) -> Terms:
        """Return the limits of this model's stays; `swap_s` is None before a swap was measured."""
        seconds = ASSUMED_SWAP_S if swap_s is None else swap_s
        stay_s = self.entry.min_stay
        return Terms(
            seconds,
            default_stay_s(seconds) if stay_s is None else stay_s,
            self.entry.max_wait,
            self.entry.max_online_wait,
            slot_rate,
        )


def models_of(settings: WorkerSettings) -> dict[str, Model]:
    """Return the models of WARMQ_MODELS by name, {} if it is not set.

    Raises:
        SettingsError: the text or file is wrong; the message names the model and the field.
    """
    if settings.models is None:
        return {}
    entries = {name: _entry(name, raw) for name, raw in _raw(settings.models).items()}
    for name, entry in entries.items():
        _check_with(name, entry, entries)
    return {
        name: Model(name, _settings(settings, name, entry), entry)
        for name, entry in entries.items()
    }


def _raw(text: str) -> Mapping[str, Any]:
    """Return the entries of a TOML file, or of JSON, by name."""
    place = "WARMQ_MODELS"
    try:
        if text.lstrip().startswith("{"):
            found = orjson.loads(text)
        else:
            place = f"WARMQ_MODELS: {text}"
            found = tomllib.loads(Path(text).read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(
            f"{place}: cannot be read: {error.strerror}; name a TOML file, or write JSON"
        ) from None
    except (ValueError, RecursionError) as error:  # the text is not UTF-8, TOML or JSON
        raise SettingsError(f"{place}: {error}") from None
    models = found.get("models", found)
    if unknown := [name for name in found if name != "models"] if "models" in found else []:
        raise SettingsError(
            f"{place}: {unknown[0]!r} is not known; write a table [models.NAME] for each model"
        )
    if not isinstance(models, dict) or not models:
        raise SettingsError(f"{place}: names no model; write a table [models.NAME] for each")
    if len(models) > MOST_MODELS:
        raise SettingsError(f"{place}: {len(models)} models; at most {MOST_MODELS} are taken")
    return models


def _entry(name: str, raw: object) -> ModelEntry:
    place = f"WARMQ_MODELS: model {name!r}"
    try:
        return ModelEntry.model_validate(raw)
    except ValidationError as error:
        problem = error.errors(include_input=False, include_url=False)[0]
        field = ".".join(map(str, problem["loc"])) or "entry"
        hint = ""
        if problem["type"] == "extra_forbidden":
            hint = did_you_mean(field, [*ModelEntry.model_fields, "with"])
        text = problem["msg"].removeprefix("Value error, ")
        raise SettingsError(f"{place}: {field}: {text}{hint}") from None


def _check_with(name: str, entry: ModelEntry, entries: Mapping[str, ModelEntry]) -> None:
    """Check that `with` names another model, which has no `with` itself."""
    main = entry.loaded_with
    place = f"WARMQ_MODELS: model {name!r}: with"
    if main is None:
        return
    if main not in entries or main == name:
        allowed = ", ".join(each for each in entries if each != name)
        remedy = f"name one of {allowed}" if allowed else "remove it"
        raise SettingsError(f"{place}: {main!r} is no other model; {remedy}")
    if (its_main := entries[main].loaded_with) is not None:
        remedy = f'write with = "{its_main}"' if its_main != name else "remove one of the two"
        raise SettingsError(f"{place}: {main!r} has a `with` itself; {remedy}")


def _settings(settings: WorkerSettings, name: str, entry: ModelEntry) -> WorkerSettings:
    """Return the settings of a worker with this model alone."""
    place = f"WARMQ_MODELS: model {name!r}"
    changed: dict[str, Any] = {"models": None, "front_ends": 1, "model": entry.path}
    try:
        changed["served_model_name"] = _NAME.validate_python(name)
        if entry.path is None and settings.needs_model:
            raise SettingsError(f'{place}: path: name the model\'s folder, path = "models/tiny"')
        for option in filter(partial(getattr, entry), ("engine_args", "adapters")):
            field = type(settings).model_fields.get(option)
            if field is None:
                raise SettingsError(f"{place}: {option}: the engine {settings.engine} has none")
            kind: TypeAdapter[Any] = TypeAdapter(cast(Any, field.annotation))
            changed[option] = kind.validate_python(getattr(entry, option))
    except ValidationError as error:
        text = error.errors(include_input=False, include_url=False)[0]["msg"]
        raise SettingsError(f"{place}: {text.removeprefix('Value error, ')}") from None
    return settings.model_copy(update=changed)
