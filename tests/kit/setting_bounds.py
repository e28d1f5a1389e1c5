"""The least and the greatest value of every setting that is a number."""

from __future__ import annotations

from typing import Any

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


BOUNDS = {
    name: found
    for name, schema in sorted(WorkerSettings.model_json_schema()["properties"].items())
    if (found := _bounds(name, schema)) is not None
}
