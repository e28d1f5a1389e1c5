"""vLLM's own serving classes, in process; models compiled for RBLN run through it too."""

from worker.engine import Engine
from worker.engine.rbln.start import prepare
from worker.engine.spec import EngineSpec
from worker.engine.vllm.options import judge_options
from worker.engine.vllm.preflight import look
from worker.engine.vllm_settings import VllmSettings
from worker.machine.finding import refuse_fatal
from worker.machine.packages import installed


def make(settings: VllmSettings) -> Engine:
    """Return the engine, not built yet.

    Raises:
        SettingsError: naming everything that cannot work, and its remedy.
    """
    settings = prepare(settings)  # first: vLLM reads the environment when it is imported
    refuse_fatal(judge_options(settings.engine_args, settings.model, installed()))
    from worker.engine.vllm.engine import VllmEngine

    return VllmEngine(settings)


ENGINE = EngineSpec(VllmSettings, make, look)
