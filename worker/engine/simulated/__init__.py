"""An engine without a model, for tests and benchmarks of the queue."""

from __future__ import annotations

from worker.engine.simulated.settings import SimulatedSettings
from worker.engine.spec import EngineSpec, Preflight


def check(settings: SimulatedSettings) -> Preflight:
    """Say how much it runs."""
    return Preflight({
        "platform": "simulated engine: no model, no device",
        "capacity": f"{settings.simulated_slots} requests at once",
    })  # fmt: skip


ENGINE = EngineSpec(SimulatedSettings, "worker.engine.simulated.engine:from_settings", check)
