"""vLLM's own serving classes, in process; models compiled for RBLN run through it too."""

from __future__ import annotations

from worker.engine import Engine
from worker.engine.spec import EngineSpec, Preflight
from worker.engine.vllm.settings import VllmSettings


def make(settings: VllmSettings) -> Engine:
    """Return the engine, not built yet.

    Raises:
        SettingsError: naming everything that cannot work, and its remedy.
    """
    from worker.engine.rbln.start import prepare
    from worker.engine.vllm.options import check_options

    settings = prepare(settings)  # first: vLLM reads the environment when it is imported
    check_options(settings)
    from worker.engine.vllm.engine import VllmEngine

    return VllmEngine(settings)


def check(settings: VllmSettings) -> Preflight:
    """Look at model, packages, devices and memory; of vLLM nothing is imported."""
    from worker.engine.vllm.preflight import look

    return look(settings)


ENGINE = EngineSpec(VllmSettings, make, check)
