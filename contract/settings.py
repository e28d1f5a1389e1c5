"""Settings that both sides share: environment `WARMQ_*`, `.env`, or `warmq.toml`.

Precedence: environment, then `.env`, then the TOML file (WARMQ_CONFIG, default
`warmq.toml` in the working directory), then the defaults below. A name that is no
setting is refused (setting_names.py).
"""

import os
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, Field, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    DotEnvSettingsSource,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from contract.errors import WarmqError
from contract.naming import DEFAULT_QUEUE, RESULT_PREFIX
from contract.redis.url import LONGEST_S, redis_url
from contract.setting_names import misspelt_keys, misspelt_variables

S = TypeVar("S", bound="SourcedSettings")

#: What Redis holds in one string; no line can be longer.
LONGEST_LINE = 512 * 2**20
#: Other keys of warmq and Celery begin like this.
_TAKEN = ("warmq:", "warmq-control", RESULT_PREFIX, "_kombu")


def printable(text: str) -> str:
    """Return the text.

    Raises:
        ValueError: it has a control character, a line break or one that only looks like a space.
    """
    if not text.isprintable():
        raise ValueError("must have printable characters only, on one line")
    return text


def _queue(name: str) -> str:
    if name.startswith(_TAKEN) or ":suspects" in name:
        raise ValueError(
            f"must not begin with {', '.join(_TAKEN)} nor have :suspects in it, which are names of "
            "other keys"
        )
    return name


RedisUrl = Annotated[SecretStr, AfterValidator(redis_url)]
Seconds = Annotated[float, Field(allow_inf_nan=False, le=LONGEST_S)]
Count = Annotated[int, Field(le=1_000_000)]
Bytes = Annotated[int, Field(ge=1, le=2**40)]
#: A name, address or path.
Text = Annotated[str, Field(max_length=4096), AfterValidator(printable)]


class SettingsError(WarmqError):
    """A setting is wrong; the message names it, what is allowed and its default."""

    code = "bad_setting"


def _toml(settings_cls: type[BaseSettings]) -> TomlConfigSettingsSource:
    """Read WARMQ_CONFIG, or warmq.toml if there is one.

    Raises:
        SettingsError: naming a file that was asked for and is not there, or is no TOML.
    """
    named = os.environ.get("WARMQ_CONFIG")
    if named and not os.path.isfile(named):  # noqa: PTH113 - Path's raises for names too long
        raise SettingsError(f"WARMQ_CONFIG: {named!r} is no file; name a TOML file, or unset it")
    file = named or "warmq.toml"
    try:
        return TomlConfigSettingsSource(settings_cls, file)
    except (OSError, ValueError, RecursionError) as error:  # also invalid dates and numbers
        raise SettingsError(f"{file} cannot be read as TOML: {error}") from None


def _refuse_misspelt(
    settings_cls: "type[SourcedSettings]",
    env: object,
    dotenv: object,
    toml: TomlConfigSettingsSource,
) -> None:
    """Look at every name of the three places.

    Raises:
        SettingsError: naming every name that would be ignored.
    """
    known = settings_cls.model_fields.keys() | Settings.model_fields.keys()
    every = settings_cls.refuses_unknown_names

    def found() -> Iterator[str]:
        yield from misspelt_variables(_variables(env), known, all_known=every)
        in_dotenv = _variables(dotenv)
        for told in misspelt_variables(in_dotenv, known, all_known=every):
            yield f".env: {told}"
        if in_dotenv.get("warmq_config"):
            yield ".env: WARMQ_CONFIG is read from the environment only; set it there"
        for told in misspelt_keys(toml.toml_data, known, all_known=every):
            yield f"{toml.toml_file_path}: {told}"

    if lines := [*found()]:
        raise SettingsError("\n".join(lines))


def _variables(source: object) -> Mapping[str, str | None]:
    return source.env_vars if isinstance(source, EnvSettingsSource) else {}


class SourcedSettings(BaseSettings):
    """Takes its fields' values from the places above, in their order."""

    #: Whether the names at all places are looked at, and whether its fields and those that
    #: setting_names.py lists are all that can be meant.
    checks_names: ClassVar[bool] = True
    refuses_unknown_names: ClassVar[bool] = False

    model_config = SettingsConfigDict(
        env_prefix="WARMQ_", env_file=".env", env_file_encoding="utf-8", extra="ignore",
        frozen=True, env_ignore_empty=True,
    )  # fmt: skip

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Put the TOML file behind environment and .env."""
        toml = _toml(settings_cls)
        if cls.checks_names:
            _refuse_misspelt(cls, env_settings, dotenv_settings, toml)
        return init_settings, env_settings, dotenv_settings, toml


class Settings(SourcedSettings):
    """What producer and worker must agree on."""

    redis_url: RedisUrl = Field(
        SecretStr("redis://127.0.0.1:6379/0"), description="Redis (broker, leases, results)"
    )
    queue: Annotated[Text, AfterValidator(_queue)] = Field(
        DEFAULT_QUEUE, min_length=1, max_length=200, description="base name of the queue"
    )
    result_ttl_s: Seconds = Field(
        604800, ge=1, description="how long results live after their batch ended (7 days)"
    )
    high_water: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = Field(
        0.6, description="share of Redis' maxmemory above which submit waits"
    )
    high_water_requests: Annotated[int, Field(gt=0, le=10**12)] = Field(
        5_000_000, description="the same as a queue length, where maxmemory is not set"
    )
    max_line_bytes: int = Field(
        10 * 2**20, gt=0, le=LONGEST_LINE, description="longest input line that is read, in bytes"
    )

    log_format: Literal["text", "json"] = Field(
        "text", description="how a worker and a gateway log: as text, or as JSON, one object a line"
    )
    traces: float | None = Field(
        None,
        ge=0,
        le=1,
        description="share of requests that OpenTelemetry traces, and with it all that fail; "
        "without it none",
    )

    @property
    def result_ttl_ms(self) -> int:
        """`result_ttl_s` as Redis takes it."""
        return int(self.result_ttl_s * 1000)


def load(cls: type[S], **overrides: Any) -> S:
    """Read one side's settings.

    Raises:
        SettingsError: naming every wrong variable, its problem and its default.
    """
    try:
        return cls(**overrides)
    except (OSError, UnicodeError) as error:  # the TOML file's are named where it is read
        raise SettingsError(f".env cannot be read: {error}; mend or remove it") from None
    except ValidationError as error:
        lines = []
        for problem in error.errors(include_input=False, include_url=False):
            told = problem["msg"].removeprefix("Value error, ")
            if not problem["loc"]:  # about several settings at once: the message names them
                lines.append(told)
                continue
            name, *inside = map(str, problem["loc"])
            told = ": ".join([*inside, told])  # of a setting that is an object
            hint = _hint(cls.model_fields.get(name))
            lines.append(f"WARMQ_{name.upper()}: {told}{hint}")
        raise SettingsError("\n".join(lines)) from None


def origins(cls: type[SourcedSettings]) -> dict[str, str]:
    """Return where each setting that is given comes from: environment, .env or the TOML file.

    Raises:
        SettingsError: a place cannot be read.
    """
    toml = _toml(cls)
    places: tuple[tuple[str, PydanticBaseSettingsSource], ...] = (
        (str(toml.toml_file_path), toml),
        (".env", DotEnvSettingsSource(cls)),
        ("environment", EnvSettingsSource(cls)),
    )  # the last one has the last word
    return {
        name: place for place, source in places for name in source() if name in cls.model_fields
    }


def _hint(field: FieldInfo | None) -> str:
    if field is None:
        return ""
    default = field.default
    if isinstance(default, SecretStr):
        default = default.get_secret_value()  # ours, and no secret
    shown = default if isinstance(default, str | int | float) and default != "" else "none"
    return f" ({field.description}; default {shown})"
