"""Exports the vllm engine, which runs vLLM in this process, also for RBLN."""

import os
from typing import TYPE_CHECKING

from contract.settings import SettingsError
from worker.engine import engine_log
from worker.engine.rbln.rules import prepare
from worker.engine.spec import EngineSpec, Preflight
from worker.engine.vllm import preflight
from worker.engine.vllm.adapter_folder import AdapterFolder
from worker.engine.vllm.options import check_options, default_front_ends
from worker.engine.vllm.sleeping import plan, together
from worker.engine.vllm_settings import VllmSettings
from worker.machine.finding import refuse_fatal
from worker.machine.packages import installed

if TYPE_CHECKING:
    from worker.engine.vllm.engine import VllmEngine


#: Loggers of torch whose messages do not help a user of `worker.check`. Without a GPU, the build of
#: torch from PyPI logs the last two.
_UNUSED_LOGS = ("-torch._library", "-torch.utils.flop_counter", "-torch.utils.cpp_extension")


def make(settings: VllmSettings) -> "VllmEngine":
    """Return an engine that the caller has to build.

    Raises:
        SettingsError: names every problem that prevents a start, and its remedy.
    """
    refuse_fatal(preflight.check_installed(installed()))
    refuse_fatal(preflight.check_folder(settings, ask_hub=True))
    if settings.engine_log not in (None, engine_log.IN_WORKERS_LOG):
        engine_log.use(settings.engine_log)
    elif settings.log_format == "json":
        # vLLM's log lines then go to the worker's handlers.
        os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
    settings = prepare(settings)  # before vLLM's import, which reads the environment
    packages = installed()
    refuse_fatal(preflight.check_device(packages))
    refuse_fatal(preflight.check_release(packages))
    refuse_fatal(check_options(settings.engine_args, settings.model, packages, settings.adapters))
    preflight.choose_sampler(packages)
    try:
        from worker.engine.vllm.engine import VllmEngine
    except ImportError as error:  # the installed vLLM lacks a name that names.py imports
        raise SettingsError(
            f"vLLM {preflight.vllm_version(packages)} cannot be used: {error}. This worker has "
            f"been tested with {preflight.TESTED}"
        ) from error
    return VllmEngine(settings)


def dry_run(settings: VllmSettings, _: Preflight) -> None:
    """Make the engine and let vLLM check the model's configuration, without loading the model.

    Takes several seconds, in which vLLM is imported.

    Raises:
        SettingsError: the start would raise the same error.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TORCH_LOGS", ",".join(_UNUSED_LOGS))
    engine = make(settings)
    try:
        engine.configure()
    finally:
        engine.shutdown()


def adapters(settings: VllmSettings) -> list[str]:
    """Return the names of the adapters of --lora-modules and of the folder of adapters."""
    folder = settings.adapters
    return [*settings.engine_args.adapters, *(AdapterFolder(folder).names() if folder else ())]


ENGINE = EngineSpec(
    VllmSettings,
    make,
    preflight.check,
    dry_run,
    "worker.engine.vllm.attached:attach",
    default_front_ends,
    sleep=plan,
    adapters=adapters,
    together=together,
)
