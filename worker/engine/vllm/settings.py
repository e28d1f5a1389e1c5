"""The settings of the vllm engine."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from contract.settings import Seconds
from worker.engine.rbln.settings import RblnSettings


class VllmSettings(RblnSettings):
    """What the vllm engine can be told."""

    needs_model: ClassVar[bool] = True

    engine_stats_s: Seconds | None = Field(
        None, ge=0.1, description="vLLM's own statistics in the log every so often; default never"
    )
    media_private_networks: bool = Field(
        False, description="let image, audio and video URLs of lines lead into private networks"
    )
