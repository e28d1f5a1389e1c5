"""The vllm engine: vLLM's serving classes in this process, also for models compiled for RBLN."""

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


#: Logs of torch that mean nothing to a check; PyPI's build logs the last two without a GPU.
_UNUSED_LOGS = ("-torch._library", "-torch.utils.flop_counter", "-torch.utils.cpp_extension")


def make(settings: VllmSettings) -> "VllmEngine":
    """Return the engine, not built yet.

    Raises:
        SettingsError: naming everything that cannot work, and its remedy.
    """
    refuse_fatal(preflight.judge_installed(installed()))
    refuse_fatal(preflight.judge_folder(settings, ask_hub=True))
    if settings.log_format == "json":
        # vLLM's lines go to the worker's handlers, not to its own.
        os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
    settings = prepare(settings)  # first: vLLM reads the environment when it is imported
    packages = installed()
    refuse_fatal(preflight.judge_device(packages))
    refuse_fatal(preflight.judge_release(packages))
    refuse_fatal(judge_options(settings.engine_args, settings.model, packages))
    preflight.choose_sampler(packages)
    try:
        from worker.engine.vllm.engine import VllmEngine
    except ImportError as error:  # the installed vLLM lacks a name of names.py
        raise SettingsError(
            f"vLLM {preflight.named(packages)} cannot be used: {error}. This worker has been "
            f"tested with {preflight.TESTED}"
        ) from error
    return VllmEngine(settings)


def rehearse(settings: VllmSettings, _: Preflight) -> None:
    """Make the engine, and let vLLM check the model's configuration; nothing is loaded.

    Takes the seconds that vLLM's import takes.

    Raises:
        SettingsError: as the start would.
    """
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
    preflight.check,
    rehearse,
    "worker.engine.vllm.attached:attach",
    default_front_ends,
)
