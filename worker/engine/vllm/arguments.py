"""Parses WARMQ_ENGINE_ARGS with vLLM's parser, and turns its errors into SettingsError."""

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager

import pydantic

from contract.naming import nearest
from contract.settings import SettingsError
from worker.engine.vllm.media import MAX_MEDIA
from worker.engine.vllm.memory import fill_in
from worker.engine.vllm.names import FlexibleArgumentParser, current_platform, make_arg_parser
from worker.engine.vllm.preflight import vllm_version
from worker.engine.vllm.priorities import default_policy
from worker.engine.vllm_settings import VllmSettings, statistics_every_s
from worker.machine.packages import installed

#: vLLM's option for the names of the model.
SERVED = "served-model-name"


class _Parser(FlexibleArgumentParser):
    def error(self, message: str) -> None:
        options = self._option_string_actions
        words = (word.partition("=")[0].rstrip(":,") for word in message.split())
        unknown = next(
            (word for word in words if word.startswith("--") and word not in options), ""
        )
        if near := nearest(unknown, options):
            message += f"; did you mean {near}"
        release = vllm_version(installed())
        raise SettingsError(
            f"WARMQ_ENGINE_ARGS: {message}; options are those of `vllm serve` {release}"
        )


def parse_engine_args(settings: VllmSettings) -> Namespace:
    """Return vLLM's options, with the worker's defaults.

    Raises:
        SettingsError: vLLM's parser refuses an option; the text is the parser's.
    """
    words = [*settings.engine_args.words, "--model", str(settings.model)]
    if statistics_every_s() is None:
        words.insert(0, "--disable-log-stats")
    if settings.served_model_name:
        words += [f"--{SERVED}", settings.served_model_name]
    elif settings.model_name != settings.model and SERVED not in settings.engine_args.options:
        words += [f"--{SERVED}", str(settings.model_name), str(settings.model)]
    parser = make_arg_parser(_Parser(add_help=False))
    default = parser.get_default("gpu_memory_utilization")
    parser.set_defaults(gpu_memory_utilization=None)  # stays None unless the user sets it
    parser.set_defaults(limit_mm_per_prompt=dict(MAX_MEDIA))
    if not installed().rbln:  # vllm-rbln has schedulers of its own
        policy = default_policy(parser.get_default("scheduling_policy"))
        parser.set_defaults(scheduling_policy=policy)
    try:
        args: Namespace = parser.parse_args(words)
    except SettingsError:
        raise
    except Exception as error:  # a --config file may be missing, or not be YAML
        raise SettingsError(f"WARMQ_ENGINE_ARGS: {error}") from None
    if current_platform.is_cpu():
        fill_in(args, installed())
    if args.gpu_memory_utilization is None:
        args.gpu_memory_utilization = default
    return args


@contextmanager
def refusals(*error_types: type[Exception]) -> Iterator[None]:
    """Raise vLLM's configuration errors, and errors of the given types, as SettingsError."""
    prefix = "WARMQ_MODEL, WARMQ_ENGINE_ARGS: vLLM refuses them: "
    try:
        yield
    except SettingsError:
        raise
    except pydantic.ValidationError as error:
        raise SettingsError(prefix + error.errors()[0]["msg"]) from None
    except error_types as error:
        raise SettingsError(prefix + " ".join(str(error).split())) from None
