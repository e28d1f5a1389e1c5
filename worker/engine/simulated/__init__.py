"""Settings of the simulated engine, which tests and benchmarks use instead of a model."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, Field, Json

from contract.settings import Count, Seconds
from worker.engine.spec import EngineSpec, Preflight, Sleep
from worker.settings import WorkerSettings


def _check_step(seconds: float) -> float:
    if 0 < seconds < 0.0001:
        raise ValueError("must be 0 or at least 0.0001")
    return seconds


def _check_log_file(path: Path) -> Path:
    # os.path is used because Path's own methods raise for names that are too long.
    if os.path.isdir(path) or not os.path.isdir(path.parent):  # noqa: PTH112
        raise ValueError("must name a file in a folder that exists")
    return path


#: Bytes of the simulated device that an engine has at most while it sleeps.
ASLEEP_BYTES = 2**30


class SimulatedTests(BaseModel, frozen=True, extra="forbid"):
    """Behaviors of the engine that tests and benchmarks need."""

    latency_s: Seconds = Field(0.2, ge=0, description="mean latency")
    step_s: Annotated[Seconds, AfterValidator(_check_step)] = Field(
        0,
        ge=0,
        description="seconds: requests end at multiples of this; 0: each ends at its own time",
    )
    log: Annotated[Path, AfterValidator(_check_log_file)] | None = Field(
        None, description="file that every start and end is appended to"
    )
    build_s: Seconds = Field(0, ge=0, description="time to start it")
    end_s: Seconds = Field(0, ge=0, description="time to end it")
    behavior: str = Field(
        "",
        pattern=r"^(simulate:[a-z-]+(=[0-9]{1,9}(\.[0-9]{1,9})?)?)?$",
        description="behavior of requests without a `user`, for example simulate:sleep=2",
    )
    process: bool = Field(False, description="with a child process that can be killed or stopped")
    sleep: Literal["", "well", "wrong", "leaks", "fails", "hangs", "wake-hangs"] = Field(
        "",
        description="how the engine sleeps between stays: well, with other answers afterwards, "
        "without freeing its memory, with an error, without an end, without waking; empty: it "
        "cannot",
    )
    names_model: bool = Field(False, description="each answer names the model that was loaded")


class SimulatedSettings(WorkerSettings):
    """The settings of the simulated engine."""

    simulated_slots: Count = Field(64, ge=1, description="requests at a time")
    simulated_tests: Json[SimulatedTests] = Field(
        SimulatedTests(),
        validate_default=False,
        description="JSON for tests: latency_s (0.2), step_s, build_s, end_s, log (a file), "
        "behavior (simulate:sleep=2), process, sleep, names_model "
        "(worker/engine/simulated/__init__.py)",
    )


def check(settings: SimulatedSettings) -> Preflight:
    """Return the rows that `python -m worker.check` shows."""
    return Preflight({
        "platform": "simulated engine: no model, no device",
        "capacity": f"{settings.simulated_slots} requests at once",
    })  # fmt: skip


def sleep(settings: SimulatedSettings, _: int) -> Sleep | str:
    """Return how the engine can sleep, or the reason why it cannot."""
    if not settings.simulated_tests.sleep:
        return "the simulated engine is not asked to sleep"
    return Sleep(settings, 2**30, ASLEEP_BYTES, "simulated memory")


def together(settings: Sequence[SimulatedSettings]) -> tuple[bool, str]:
    """Return whether several engines can run at the same time, and why."""
    return True, f"{len(settings)} simulated engines take no memory"


#: The module that defines the engine.
_MODULE = "worker.engine.simulated.engine"
ENGINE = EngineSpec(
    SimulatedSettings,
    f"{_MODULE}:from_settings",
    check,
    attach=f"{_MODULE}:from_settings",
    sleep=sleep,
    together=together,
)
