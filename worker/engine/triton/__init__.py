"""Requests go to the vLLM backend of Triton servers."""

from __future__ import annotations

from worker.engine.spec import EngineSpec, Preflight
from worker.engine.triton.settings import TritonSettings


def check(settings: TritonSettings) -> Preflight:
    """Say which servers are asked."""
    each = settings.triton_slots or "as many as the servers take"
    return Preflight({
        "platform": "triton servers, nothing runs here",
        "servers": f"{settings.triton_url}, model {settings.triton_model}",
        "model": str(settings.model),
        "capacity": f"{each} at once at each server",
    })  # fmt: skip


ENGINE = EngineSpec(TritonSettings, "worker.engine.triton.engine:TritonEngine", check)
