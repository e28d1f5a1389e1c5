"""Settings of the simulated engine, which tests and benchmarks use instead of a model."""

import os
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, Field, Json

from contract.settings import Count, Seconds
from worker.engine.spec import EngineSpec, Preflight
from worker.settings import WorkerSettings


def _step(seconds: float) -> float:
    if 0 < seconds < 0.0001:
        raise ValueError("must be 0 or at least 0.0001")
    return seconds


def _log_file(path: Path) -> Path:
    # os.path is used because Path's own methods raise for names that are too long.
    if os.path.isdir(path) or not os.path.isdir(path.parent):  # noqa: PTH112
        raise ValueError("must name a file in a folder that exists")
    return path


class SimulatedTests(BaseModel, frozen=True, extra="forbid"):
    """Behaviors of the engine that tests and benchmarks need."""

    step_s: Annotated[Seconds, AfterValidator(_step)] = Field(
        0,
        ge=0,
        description="seconds: requests end at multiples of this; 0: each ends at its own time",
    )
    log: Annotated[Path, AfterValidator(_log_file)] | None = Field(
        None, description="file that every start and end is appended to"
    )
    build_s: Seconds = Field(0, ge=0, description="time to start it")
    behavior: str = Field(
        "",
        pattern=r"^(simulate:[a-z-]+(=[0-9]{1,9}(\.[0-9]{1,9})?)?)?$",
        description="behavior of requests without a `user`, for example simulate:sleep=2",
    )
    process: bool = Field(False, description="with a child process that can be killed or stopped")


class SimulatedSettings(WorkerSettings):
    """The settings of the simulated engine."""

    simulated_slots: Count = Field(64, ge=1, description="max_num_seqs")
    simulated_latency_s: Seconds = Field(0.2, ge=0, description="mean latency")
    simulated_tests: Json[SimulatedTests] = Field(
        SimulatedTests(),
        validate_default=False,
        description="what tests of the queue need, as JSON; its fields are in "
        "worker/engine/simulated/__init__.py",
    )


def check(settings: SimulatedSettings) -> Preflight:
    return Preflight({
        "platform": "simulated engine: no model, no device",
        "capacity": f"{settings.simulated_slots} requests at once",
    })  # fmt: skip


#: The module that defines the engine.
_MODULE = "worker.engine.simulated.engine"
ENGINE = EngineSpec(
    SimulatedSettings, f"{_MODULE}:from_settings", check, attach=f"{_MODULE}:from_settings"
)
