"""The settings that models compiled for RBLN read too; vLLM's are these and more."""

from __future__ import annotations

from pydantic import Field

from contract.settings import Seconds
from worker.engine.engine_args import EngineArgs
from worker.settings import WorkerSettings


class RblnSettings(WorkerSettings):
    """What an engine on RBLN can be told."""

    engine_args: EngineArgs = Field(
        EngineArgs(), description="vLLM's own command line options, in vLLM's spelling"
    )
    kill_grace_s: Seconds | None = Field(
        None, ge=0, description="between SIGTERM and SIGKILL of an engine; default 5, RBLN 120"
    )
    rbln_devices: str | None = Field(
        None,
        pattern=r"^[0-9]{1,4}(,[0-9]{1,4})*$",
        description="RBLN: cards of this worker's engine, as 0,1",
    )
    rbln_timeout_s: Seconds = Field(
        60, gt=0, description="RBLN: the runtime's own time limit on one step"
    )
