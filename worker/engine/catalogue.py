"""The engines, by the name that WARMQ_ENGINE takes."""

from __future__ import annotations

from worker.engine import Engine
from worker.engine.rbln.start import prepare
from worker.engine.vllm.options import check_options
from worker.settings import WorkerSettings


def make_engine(settings: WorkerSettings) -> Engine:
    """Return the engine the settings name, not built yet."""
    if settings.engine == "simulated":
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
    if settings.engine == "triton":
        from worker.engine.triton.engine import TritonEngine

        return TritonEngine(settings)
    if settings.engine == "openai":
        from worker.engine.openai.engine import OpenAIEngine

        return OpenAIEngine(settings)
    settings = prepare(settings)  # first: vLLM reads the environment when it is imported
    check_options(settings)
    from worker.engine.vllm.engine import VllmEngine

    return VllmEngine(settings)
