"""WARMQ_ENGINE_ARGS through vLLM's own parser."""

from argparse import Namespace

from contract.settings import SettingsError
from worker.engine.vllm.cpu_memory import fill_in
from worker.engine.vllm.media import MAX_MEDIA
from worker.engine.vllm.names import FlexibleArgumentParser, current_platform, make_arg_parser
from worker.engine.vllm.refusals import meant
from worker.engine.vllm_settings import VllmSettings, statistics_every_s
from worker.machine.packages import installed


class _Parser(FlexibleArgumentParser):
    def error(self, message: str) -> None:
        told = message + meant(message, self._option_string_actions)
        raise SettingsError(f"WARMQ_ENGINE_ARGS: {told}; options are those of `vllm serve`")


def parse_engine_args(settings: VllmSettings) -> Namespace:
    """Return WARMQ_ENGINE_ARGS as vLLM's own parser does, with what is chosen for a CPU.

    Raises:
        SettingsError: in the words of vLLM's parser.
    """
    words = [*settings.engine_args.words, "--model", str(settings.model)]
    if statistics_every_s() is None:
        words.insert(0, "--disable-log-stats")
    if settings.served_model_name:
        words += ["--served-model-name", settings.served_model_name]
    parser = make_arg_parser(_Parser(add_help=False))
    default = parser.get_default("gpu_memory_utilization")
    parser.set_defaults(gpu_memory_utilization=None)  # to tell one that was given from this
    parser.set_defaults(limit_mm_per_prompt=dict(MAX_MEDIA))
    try:
        args: Namespace = parser.parse_args(words)
    except SettingsError:
        raise
    except Exception as error:  # a --config file may be missing, or be no YAML
        raise SettingsError(f"WARMQ_ENGINE_ARGS: {error}") from None
    if current_platform.is_cpu():
        fill_in(args, installed())
    if args.gpu_memory_utilization is None:
        args.gpu_memory_utilization = default
    return args
