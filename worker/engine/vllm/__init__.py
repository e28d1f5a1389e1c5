"""vLLM's own serving classes, in process; models compiled for RBLN run through it too."""

import os
from typing import TYPE_CHECKING

from contract.settings import SettingsError
from worker.engine.rbln.rules import prepare
from worker.engine.spec import EngineSpec, Preflight
from worker.engine.vllm import preflight
from worker.engine.vllm.options import default_front_ends, judge_options
from worker.engine.vllm_settings import VllmSettings
from worker.machine.finding import refuse_fatal
from worker.machine.packages import installed

if TYPE_CHECKING:
    from worker.engine.vllm.engine import VllmEngine


#: What torch logs while vLLM is checked: the last two miss a GPU, in the build that PyPI has.
_UNUSED_LOGS = ("-torch._library", "-torch.utils.flop_counter", "-torch.utils.cpp_extension")


def make(settings: VllmSettings) -> "VllmEngine":
    """Return the engine, not built yet.

    Raises:
        SettingsError: naming everything that cannot work, and its remedy.
    """
    refuse_fatal(preflight.judge_installed(installed()))
    refuse_fatal(preflight.judge_folder(settings, ask_hub=True))
    if settings.log_format == "json":
        # It would write through handlers of its own; so its lines go to the worker's.
        os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
    settings = prepare(settings)  # first: vLLM reads the environment when it is imported
    packages = installed()
    refuse_fatal(preflight.judge_device(packages))
    refuse_fatal(preflight.judge_release(packages))
    refuse_fatal(judge_options(settings.engine_args, settings.model, packages))
    preflight.choose_sampler(packages)
    try:
        from worker.engine.vllm.engine import VllmEngine
    except ImportError as error:
        raise SettingsError(  # a name that is needed is not in the installed vLLM
            f"vLLM {preflight.named(packages)} cannot be used: {error}. This worker has been "
            f"tested with {preflight.TESTED}"
        ) from error

    return VllmEngine(settings)


def rehearse(settings: VllmSettings, _: Preflight) -> None:
    """Make the engine, and let vLLM read the model's configuration; nothing is loaded.

    Takes the seconds that vLLM's import takes.

    Raises:
        SettingsError: as the start would.
    """
    # What these log is of no use beside the findings.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TORCH_LOGS", ",".join(_UNUSED_LOGS))
    engine = make(settings)
    try:
        engine.configure()
    finally:
        engine.shutdown()


ENGINE = EngineSpec(
    VllmSettings,
    make,
    preflight.look,
    rehearse,
    "worker.engine.vllm.attached:attach",
    default_front_ends,
)
