"""WARMQ_ENGINE_ARGS through vLLM's own parser, and what is filled in for a CPU."""

from __future__ import annotations

import logging
from argparse import ArgumentParser, Namespace

from contract.settings import SettingsError
from worker.engine.vllm.cpu_memory import OPTIONS, applies, choose, chosen_already
from worker.engine.vllm_settings import VllmSettings
from worker.machine.packages import installed

log = logging.getLogger(__name__)


def parsed(parser: ArgumentParser, settings: VllmSettings, on_cpu: bool) -> Namespace:
    """Return the options; `parser` is vLLM's, `on_cpu` what vLLM says of its platform.

    Raises:
        SettingsError: in the words of vLLM's parser.
    """
    quiet = [] if settings.engine_stats_s else ["--disable-log-stats"]
    words = [*quiet, *settings.engine_args.words, "--model", str(settings.model)]
    if settings.served_model_name:
        words += ["--served-model-name", settings.served_model_name]
    default = parser.get_default("gpu_memory_utilization")
    parser.set_defaults(gpu_memory_utilization=None)  # to tell one that was given from this
    try:
        args = parser.parse_args(words)
    except SettingsError:
        raise
    except Exception as error:  # a --config file may be missing, or be no YAML
        raise SettingsError(f"WARMQ_ENGINE_ARGS: {error}") from None
    if on_cpu and applies(installed()):
        _choose_memory(args)
    if args.gpu_memory_utilization is None:
        args.gpu_memory_utilization = default
    return args


def _choose_memory(args: Namespace) -> None:
    """Write the options that nobody gave: vLLM's own are made for a GPU that is all its own."""
    given = {name: getattr(args, name.replace("-", "_")) for name in OPTIONS}
    asked = {name: str(value) for name, value in given.items() if value is not None}
    if not chosen_already(asked):
        choice = choose(asked, args.model)
        args.kv_cache_memory_bytes, args.gpu_memory_utilization = choice.size, choice.share
        log.warning("%s", choice.told, extra={"action": "memory_chosen"})
