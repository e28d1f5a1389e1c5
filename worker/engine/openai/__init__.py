"""Requests go to servers that speak OpenAI's API: vLLM's own, or any other."""

from __future__ import annotations

from worker.engine.openai.settings import OpenAISettings
from worker.engine.spec import EngineSpec, Preflight


def check(settings: OpenAISettings) -> Preflight:
    """Say which servers are asked; what they serve is known once the worker has started."""
    each = settings.openai_concurrency or "as many as the servers take"
    return Preflight({
        "platform": "openai servers, nothing runs here",
        "servers": ", ".join(settings.base_urls),
        "model": str(settings.model or "the first that they list"),
        "capacity": f"{each} at once at each server",
    })  # fmt: skip


ENGINE = EngineSpec(OpenAISettings, "worker.engine.openai.engine:OpenAIEngine", check)
