"""Reads settings, and defines those that worker, producer and gateway share.

A setting is taken from the first place that has it: the environment (`WARMQ_*`), `.env`, the TOML
file (WARMQ_CONFIG, default `warmq.toml` in the working directory), the default below. Misspelt
names are refused; a worker refuses all unknown names (setting_names.py).
"""

import os
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, Field, SecretStr, ValidationError
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

#: Bytes of the longest string that Redis stores; a line cannot be longer.
LONGEST_LINE = 512 * 2**20
#: The first characters of other keys of warmq and Celery, with which no queue's name may begin.
_RESERVED = ("warmq:", "warmq-control", RESULT_PREFIX, "_kombu")


def printable(text: str) -> str:
    """Return the text; raise ValueError if it has control characters or line breaks."""
    if not text.isprintable():
        raise ValueError("must have printable characters only, on one line")
    return text


def _checked_queue(name: str) -> str:
    if name.startswith(_RESERVED) or ":suspects" in name:
        raise ValueError(
            f"must not begin with {', '.join(_RESERVED)} nor contain :suspects: these are names of "
            "other keys"
        )
    return name


RedisUrl = Annotated[SecretStr, AfterValidator(redis_url)]
Seconds = Annotated[float, Field(allow_inf_nan=False, le=LONGEST_S)]
Count = Annotated[int, Field(le=1_000_000)]
Bytes = Annotated[int, Field(ge=1, le=2**40)]
#: The type of settings that are a name, an address or a path.
Text = Annotated[str, Field(max_length=4096), AfterValidator(printable)]


#: The field of WARMQ_GATEWAY_PRIVATE_WEBHOOKS, for gateways and, with `submit --notify`, workers.
PRIVATE_WEBHOOKS = Field(False, description="whether webhooks may go to private addresses")


class SettingsError(WarmqError):
    """A setting is wrong; the message names the setting, its allowed values and its default."""

    code = "bad_setting"


def _toml(settings_cls: type[BaseSettings]) -> TomlConfigSettingsSource:
    """Read WARMQ_CONFIG, or warmq.toml if it exists."""
    named = os.environ.get("WARMQ_CONFIG")
    if named and not os.path.isfile(named):  # noqa: PTH113 - Path.is_file raises for a long name
        raise SettingsError(f"WARMQ_CONFIG: {named!r} is not a file; name a TOML file, or unset it")
    file = named or "warmq.toml"
    try:
        return TomlConfigSettingsSource(settings_cls, file)
    except (OSError, ValueError, RecursionError) as error:  # also invalid dates and numbers
        raise SettingsError(f"{file} cannot be read as TOML: {error}") from None


def _misspelt(
    cls: "type[SourcedSettings]", env: object, dotenv: object, toml: TomlConfigSettingsSource
) -> Iterator[str]:
    """Yield a message for each name in environment, .env or TOML file that would be ignored."""
    known = cls.model_fields.keys() | Settings.model_fields.keys()
    all_known = cls.refuses_unknown_names
    yield from misspelt_variables(_variables(env), known, all_known=all_known)
    in_dotenv = _variables(dotenv)
    for message in misspelt_variables(in_dotenv, known, all_known=all_known):
        yield f".env: {message}"
    if in_dotenv.get("warmq_config"):
        yield ".env: WARMQ_CONFIG is read from the environment only; set it there"
    for message in misspelt_keys(toml.toml_data, known, all_known=all_known):
        yield f"{toml.toml_file_path}: {message}"


def _variables(source: object) -> Mapping[str, str | None]:
    return source.env_vars if isinstance(source, EnvSettingsSource) else {}


class SourcedSettings(BaseSettings):
    """The base class of settings; reads them from the places that the module's docstring names."""

    #: Whether names in all places are checked.
    checks_names: ClassVar[bool] = True
    #: Whether names that are not similar to a known name are refused too.
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
        """Return the places of settings, first to last; check the names in them."""
        toml = _toml(settings_cls)
        if cls.checks_names:
            messages = [*_misspelt(cls, env_settings, dotenv_settings, toml)]
            if messages:
                raise SettingsError("\n".join(messages))
        return init_settings, env_settings, dotenv_settings, toml


class Settings(SourcedSettings):
    """The settings that worker, producer and gateway share."""

    redis_url: RedisUrl = Field(
        SecretStr("redis://127.0.0.1:6379/0"), description="URL of Redis: broker, leases, results"
    )
    queue: Annotated[Text, AfterValidator(_checked_queue)] = Field(
        DEFAULT_QUEUE, min_length=1, max_length=200, description="base name of the queue"
    )
    result_ttl_s: Seconds = Field(
        604800,
        ge=1,
        description="seconds for which results are kept after their batch ended (7 days)",
    )
    high_water: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = Field(
        0.6, description="share of Redis's maxmemory above which submit waits"
    )
    high_water_requests: Annotated[int, Field(gt=0, le=10**12)] = Field(
        5_000_000,
        description="requests in the queue above which submit waits, if maxmemory is not set",
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
        description="share of requests that are traced, in addition to all that fail; unset: none",
    )

    @property
    def result_ttl_ms(self) -> int:
        """The setting `result_ttl_s` in milliseconds, as the Lua scripts take it."""
        return int(self.result_ttl_s * 1000)


def load(cls: type[S], **overrides: Any) -> S:
    """Read the settings of a class.

    Raises:
        SettingsError: settings are wrong; the message names each, its problem and its default.
    """
    try:
        return cls(**overrides)
    except (OSError, UnicodeError) as error:  # errors of .env; _toml handles the TOML file's
        raise SettingsError(f".env cannot be read: {error}; fix or remove it") from None
    except ValidationError as error:
        problems = error.errors(include_input=False, include_url=False)
        raise SettingsError("\n".join(_problem(cls, one) for one in problems)) from None


def _problem(cls: type[SourcedSettings], problem: Mapping[str, Any]) -> str:
    text = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:  # a problem of several settings, whose message names them
        return str(text)
    name, *inside = map(str, problem["loc"])
    text = ": ".join([f"WARMQ_{name.upper()}", *inside, text])
    if (field := cls.model_fields.get(name)) is None:
        return text
    default = field.default
    if isinstance(default, SecretStr):
        default = default.get_secret_value()  # the default is public
    shown = default if isinstance(default, str | int | float) and default != "" else "none"
    return f"{text} ({field.description}; default {shown})"


def origins(cls: type[SourcedSettings]) -> dict[str, str]:
    """Return the place of each setting that is set: environment, .env or the TOML file."""
    toml = _toml(cls)
    places: tuple[tuple[str, PydanticBaseSettingsSource], ...] = (
        (str(toml.toml_file_path), toml),
        (".env", DotEnvSettingsSource(cls)),
        ("environment", EnvSettingsSource(cls)),
    )  # the last place that has a setting counts
    return {
        name: place for place, source in places for name in source() if name in cls.model_fields
    }
