"""Settings of the vllm engine, and the parser of WARMQ_ENGINE_ARGS."""

import json
import math
import os
import shlex
from typing import Any, ClassVar, Self

from pydantic import Field, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, core_schema

from contract.settings import Seconds, SettingsError, Text
from worker.engine.engine_log import IN_WORKERS_LOG, choose
from worker.settings import WorkerSettings

#: vLLM's variable for the seconds between two log lines of statistics (`vllm serve`: 10).
STATISTICS = "VLLM_LOG_STATS_INTERVAL"
#: Long names of vLLM's short options.
LONG_NAMES = {
    "tp": "tensor-parallel-size", "pp": "pipeline-parallel-size", "dp": "data-parallel-size",
    "dpl": "data-parallel-size-local", "sc": "speculative-config",
}  # fmt: skip


class EngineArgs(str):
    """The options of `vllm serve`, as text and as parsed values.

    `words` are the options split as in a shell. `options` has the values by the option's long name
    without dashes, '' for flags; `values` has all values of each. `adapters` has the folders of
    --lora-modules by name. vLLM's own parser checks the options later: it can be imported only when
    the engine starts.

    Raises:
        ValueError: the text has a control character, an open quote, or a backslash at its end.
    """

    def __init__(self, text: str = "") -> None:
        if not "".join(text.split()).isprintable():
            raise ValueError("must have printable characters only")
        try:
            self.words = shlex.split(text)
        except ValueError as error:
            raise ValueError(f"{error}; write it as in a shell, with every quote closed") from None
        self.options: dict[str, str] = {}
        self.values: dict[str, list[str]] = {}
        self.adapters: dict[str, str] = {}
        name = ""
        for word in self.words:
            value = word
            if word.startswith("-") and not word[1:2].isdigit():
                name, _, value = word.lstrip("-").partition("=")
                name = name.replace("_", "-")
                name = LONG_NAMES.get(name, name)
                self.options[name] = value
            elif name:
                self.options[name] = word
            if name:
                self.values.setdefault(name, []).append(value)
            if name == "lora-modules":
                self.adapters |= _adapter(value)

    @classmethod
    def __get_pydantic_core_schema__(cls, _: Any, __: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(cls, core_schema.str_schema())


def _adapter(module: str) -> dict[str, str]:
    """Return one adapter of --lora-modules as {name: folder}; {} if vLLM will refuse it."""
    if not module.startswith("{"):
        name, _, path = module.partition("=")
        return {name: path} if path and name else {}
    try:
        fields = json.loads(module)
        return {str(fields["name"]): str(fields["path"])}
    except (ValueError, KeyError, TypeError):
        return {}


class VllmSettings(WorkerSettings):
    """Settings of the vllm engine, on any device."""

    needs_model: ClassVar[bool] = True

    engine_args: EngineArgs = Field(
        EngineArgs(), description="vLLM's own command line options, in vLLM's spelling"
    )
    adapters: Text | None = Field(
        None,
        description="folder of LoRA adapters: a line whose `model` is the name of a folder in it "
        "gets that adapter, loaded on demand; needs --enable-lora",
    )
    engine_log: Text | None = Field(
        None,
        description="file for vLLM's log; `-`: the worker's own log. Default: next to the worker's "
        "log, as worker.engine.log for worker.log; `-` with WARMQ_LOG_FORMAT=json",
    )
    kill_grace_s: Seconds | None = Field(
        None,
        ge=0,
        description="seconds from an engine's SIGTERM to its SIGKILL; default 5, with RBLN 120",
    )
    media_private_networks: bool = Field(
        False, description="let image, audio and video URLs of lines lead into private networks"
    )
    rbln_devices: str | None = Field(
        None,
        pattern=r"^[0-9]{1,4}(,[0-9]{1,4})*$",
        description="RBLN: numbers of the cards for this worker's engine, for example 0,1",
    )

    @model_validator(mode="after")
    def _one_process_loads_adapters(self) -> Self:
        if self.adapters and (self.front_ends or 1) > 1:
            raise ValueError(
                "WARMQ_FRONT_ENDS: with WARMQ_ADAPTERS one process feeds the engine; unset "
                "WARMQ_FRONT_ENDS"
            )
        return self

    def with_engine_log(self, workers_log: str | None) -> Self:
        """Return these settings with the path of the engine's log; raise SettingsError."""
        return self.model_copy(
            update={"engine_log": choose(self.engine_log, self.log_format, workers_log)}
        )

    @property
    def see_engine_log(self) -> str:
        """The end of an error's text, with the path of vLLM's log; '' if there is no such file."""
        path = self.engine_log
        return f"; vLLM's log is {path}" if path not in (None, IN_WORKERS_LOG) else ""


def statistics_every_s() -> float | None:
    """Return the seconds between two log lines of vLLM's statistics; None if not set.

    Raises:
        SettingsError: the variable is not a number of seconds from 0.1.
    """
    text = os.environ.get(STATISTICS)
    if not text:
        return None
    try:
        every_s = float(text)
    except ValueError:
        every_s = 0.0
    if not 0.1 <= every_s < math.inf:
        raise SettingsError(f"{STATISTICS}: give seconds, 0.1 at least, or unset it")
    return every_s
