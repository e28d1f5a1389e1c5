"""vLLM's own serving classes, in process; models compiled for RBLN run through it too."""

from __future__ import annotations

from worker.engine import Engine
from worker.engine.spec import EngineSpec, Preflight
from worker.engine.vllm_settings import VllmSettings
from worker.machine.finding import refuse_fatal
from worker.machine.packages import installed


def make(settings: VllmSettings) -> Engine:
    """Return the engine, not built yet.

    Raises:
        SettingsError: naming everything that cannot work, and its remedy.
    """
    from worker.engine.rbln.start import prepare
    from worker.engine.vllm.options import judge_options

    settings = prepare(settings)  # first: vLLM reads the environment when it is imported
    refuse_fatal(judge_options(settings.engine_args, settings.model, installed()))
    from worker.engine.vllm.engine import VllmEngine

    return VllmEngine(settings)


def check(settings: VllmSettings) -> Preflight:
    """Look at model, packages, devices and memory; of vLLM nothing is imported."""
    from worker.engine.vllm.preflight import look

    return look(settings)


ENGINE = EngineSpec(VllmSettings, make, check)
