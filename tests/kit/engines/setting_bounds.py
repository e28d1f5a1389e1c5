"""All settings of a worker: which engine reads each, and the bounds of those that are numbers."""

from __future__ import annotations

from typing import Any

from worker.engine.catalogue import BUILT_IN, find_engine
from worker.settings import WorkerSettings


def _bounds(name: str, schema: dict[str, Any]) -> tuple[float, float] | None:
    for part in schema.get("anyOf", [schema]):
        if part.get("type") in ("number", "integer"):
            assert "maximum" in part, f"{name} has no greatest value"
            if "minimum" in part:
                return part["minimum"], part["maximum"]
            step = 1 if part["type"] == "integer" else 1e-6
            return part["exclusiveMinimum"] + step, part["maximum"]
    return None


_SCHEMAS: dict[str, Any] = {}
#: Setting of one engine -> that engine.
ENGINE_OF: dict[str, str] = {}
for _engine in BUILT_IN:
    _schemas = find_engine(_engine).settings.model_json_schema()["properties"]
    ENGINE_OF |= dict.fromkeys(_schemas.keys() - WorkerSettings.model_fields.keys(), _engine)
    _SCHEMAS |= _schemas
NAMES = sorted(_SCHEMAS)
#: The least and the greatest value.
BOUNDS = {name: found for name in NAMES if (found := _bounds(name, _SCHEMAS[name])) is not None}
