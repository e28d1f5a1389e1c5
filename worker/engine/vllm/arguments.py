"""WARMQ_ENGINE_ARGS through vLLM's own parser, and what vLLM refuses of it as one sentence."""

from argparse import Namespace
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches

import pydantic

from contract.settings import SettingsError
from worker.engine.vllm.media import MAX_MEDIA
from worker.engine.vllm.memory import fill_in
from worker.engine.vllm.names import FlexibleArgumentParser, current_platform, make_arg_parser
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


@contextmanager
def refusals(*kinds: type[Exception]) -> Iterator[None]:
    """Raise the checks of vLLM's configuration, and errors of these kinds, as SettingsError."""
    told = "WARMQ_MODEL, WARMQ_ENGINE_ARGS: vLLM refuses them: "
    try:
        yield
    except SettingsError:
        raise
    except pydantic.ValidationError as error:
        raise SettingsError(told + error.errors()[0]["msg"]) from None
    except kinds as error:
        raise SettingsError(told + " ".join(str(error).split())) from None


def meant(message: str, options: Iterable[str]) -> str:
    """Return which of the options was meant, if a parser's message quotes one that is unknown."""
    known = [*options]
    words = [word.partition("=")[0].rstrip(":,") for word in message.split()]
    unknown = [word for word in words if word.startswith("--") and word not in known]
    near = get_close_matches(unknown[0], known, 1) if unknown else []
    return f"; did you mean {near[0]}" if near else ""
