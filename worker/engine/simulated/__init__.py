"""An engine without a model, for tests and benchmarks of the queue."""

from __future__ import annotations

from worker.engine import Engine
from worker.engine.simulated.settings import SimulatedSettings
from worker.engine.spec import EngineSpec, Preflight


def make(settings: SimulatedSettings) -> Engine:
    """Return the engine, not built yet."""
    from worker.engine.simulated.engine import SimulatedEngine

    return SimulatedEngine(
        settings.simulated_slots,
        settings.simulated_latency_s,
        step_s=settings.simulated_step_s,
        log=settings.simulated_log,
        build_s=settings.simulated_build_s,
        process=settings.simulated_process,
        fate=settings.simulated_fate,
    )


def check(settings: SimulatedSettings) -> Preflight:
    """Say how much it runs."""
    return Preflight({
        "platform": "simulated engine: no model, no device",
        "capacity": f"{settings.simulated_slots} requests at once",
    })  # fmt: skip


ENGINE = EngineSpec(SimulatedSettings, make, check)
