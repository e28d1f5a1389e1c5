"""Settings that both sides share: environment `WARMQ_*`, `.env`, or `warmq.toml`.

Precedence: environment, then `.env`, then the TOML file (WARMQ_CONFIG, default
`warmq.toml` in the working directory), then the defaults below.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr, ValidationError
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from contract.errors import WarmqError
from contract.keys import DEFAULT_QUEUE

S = TypeVar("S", bound="Settings")

_SCHEMES = ("redis://", "rediss://", "unix://", "sentinel://")


def _redis_url(url: SecretStr) -> SecretStr:
    if not url.get_secret_value().startswith(_SCHEMES):
        raise ValueError(f"must start with one of {', '.join(_SCHEMES)}")
    if not _readable(url.get_secret_value()):
        # Said here, without the URL: what libraries say of it may quote the password's pieces.
        raise ValueError("not a Redis URL; percent-encode what is special in the password")
    return url


def _readable(url: str) -> bool:
    """Say whether every part is where it belongs: no `/`, `#` or `@` of a password has moved it."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    if "@" in parts.path or parts.fragment:
        return False
    if parts.scheme == "unix":
        return True
    hosts = parts.netloc.rpartition("@")[2].split(",")
    ports = (host.rpartition("]")[2].rpartition(":")[2] for host in hosts if ":" in host)
    return all(port == "" or port.isdecimal() for port in ports)


RedisUrl = Annotated[SecretStr, AfterValidator(_redis_url)]


class Settings(BaseSettings):
    """What producer and worker must agree on."""

    model_config = SettingsConfigDict(
        env_prefix="WARMQ_", env_file=".env", extra="ignore", frozen=True, env_ignore_empty=True
    )

    redis_url: RedisUrl = Field(
        SecretStr("redis://127.0.0.1:6379/0"), description="Redis (broker, leases, results)"
    )
    queue: str = Field(DEFAULT_QUEUE, min_length=1, description="base name of the queue")
    result_ttl_s: float = Field(
        604800, gt=0, description="how long results live after their batch ended (7 days)"
    )
    high_water: float = Field(
        0.6, gt=0, le=1, description="share of Redis' maxmemory above which submit waits"
    )
    high_water_requests: int = Field(
        5_000_000, gt=0, description="the same as a queue length, where maxmemory is not set"
    )
    max_line_bytes: int = Field(
        10 * 2**20, gt=0, description="longest input line that is read, in bytes"
    )

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
        toml = TomlConfigSettingsSource(settings_cls, os.environ.get("WARMQ_CONFIG", "warmq.toml"))
        return init_settings, env_settings, dotenv_settings, toml

    @property
    def result_ttl_ms(self) -> int:
        """`result_ttl_s` as Redis takes it."""
        return int(self.result_ttl_s * 1000)


class SettingsError(WarmqError):
    """A setting is wrong; the message names it, what is allowed and its default."""

    code = "bad_setting"


def load(cls: type[S], **overrides: Any) -> S:
    """Read one side's settings.

    Raises:
        SettingsError: naming every wrong variable, its problem and its default.
    """
    try:
        return cls(**overrides)
    except ValidationError as error:
        lines = []
        for problem in error.errors(include_input=False, include_url=False):
            if not problem["loc"]:  # about several settings at once: the message names them
                lines.append(problem["msg"].removeprefix("Value error, "))
                continue
            name = str(problem["loc"][0])
            known = cls.model_fields.get(name)
            hint = f" ({known.description}; default {known.default})" if known else ""
            lines.append(f"WARMQ_{name.upper()}: {problem['msg']}{hint}")
        raise SettingsError("\n".join(lines)) from None
