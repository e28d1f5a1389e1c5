"""Settings of the openai engine, which sends requests to servers with OpenAI's API.

The servers may be vLLM's own, or those of any other software.
"""

from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr, model_validator

from contract.redis.url import is_address
from contract.settings import Count, Text
from worker.engine.remote import RemoteSettings, preflight_of
from worker.engine.spec import EngineSpec, Preflight

#: Ends of the URLs of endpoints, which users give by mistake instead of a base URL.
_ENDPOINTS = ("/completions", "/models", "/embeddings", "/responses", "/messages")


#: The type of a target in milliseconds.
Millis = Annotated[float, Field(gt=0, le=600_000, allow_inf_nan=False)]


def _check_key(key: SecretStr) -> SecretStr:
    text = key.get_secret_value()
    if not (text.isascii() and text.isprintable()):
        raise ValueError("must be printable ASCII, for it is sent in an HTTP header")
    return key


def _check_path(path: str) -> str:
    if path and not path.startswith("/"):
        raise ValueError("must begin with /, for example /health/liveliness")
    return path


class OpenAISettings(RemoteSettings):
    """Settings of the openai engine."""

    openai_base_urls: Text = Field(
        "",
        description="the servers' base URLs, for example http://host:8000/v1,...",
    )
    openai_api_key: Annotated[SecretStr, AfterValidator(_check_key)] = Field(
        SecretStr(""), description="the servers' key"
    )
    openai_concurrency: Count | None = Field(
        None, ge=1, description="most requests at once for a server; unset: found by the worker"
    )
    openai_shared_with: Literal["nobody", "people", "people-abort"] = Field(
        "nobody",
        description="nobody: the worker uses all that the servers can do; people: the worker gives "
        "way to the servers' other clients; people-abort: the worker also ends running requests "
        "for them",
    )
    openai_ttft_ms: Millis | None = Field(
        None,
        description="with people: longest time to the first token; default: 3 times the time "
        "while the worker sends nothing",
    )
    openai_itl_ms: Millis | None = Field(
        None,
        description="with people: longest mean time between tokens; default: 2.5 times the time "
        "while the worker sends nothing",
    )
    openai_health_path: Annotated[Text, AfterValidator(_check_path)] = Field(
        "",
        description="path of a server's health check, for example "
        "/health/liveliness; default /health of vLLM servers, otherwise the list of models",
    )

    @model_validator(mode="after")
    def _servers_are_named(self) -> Self:
        if not self.base_urls:
            raise ValueError("WARMQ_OPENAI_BASE_URLS: name a server, e.g. http://127.0.0.1:8000/v1")
        if not all(map(_is_base_url, self.base_urls)):  # not shown: it may contain a password
            raise ValueError(
                "WARMQ_OPENAI_BASE_URLS: name http:// or https:// URLs, separated by commas; "
                "give a key in WARMQ_OPENAI_API_KEY"
            )
        if endpoints := [url for url in self.base_urls if url.endswith(_ENDPOINTS)]:
            raise ValueError(
                f"WARMQ_OPENAI_BASE_URLS: {endpoints[0]} is one endpoint; name the URL before it, "
                "which mostly ends in /v1"
            )
        return self

    @property
    def base_urls(self) -> list[str]:
        """The base URLs of the servers, without slashes at the end."""
        urls = (url.strip().rstrip("/") for url in self.openai_base_urls.split(","))
        return [url for url in urls if url]


def _is_base_url(url: str) -> bool:
    """Whether this is an http:// or https:// URL without a user name and password."""
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        return False
    if parts.scheme not in ("http", "https") or not host or "@" in url or " " in url:
        return False
    return is_address(parts.netloc)


def check(settings: OpenAISettings) -> Preflight:
    """Describe the configured servers. Only a start learns which models they serve."""
    each = settings.openai_concurrency or "as many as the servers take"
    model = str(settings.model or "the first that they list")
    return preflight_of("openai", ", ".join(settings.base_urls), model, each)


ENGINE = EngineSpec(
    OpenAISettings,
    "worker.engine.openai.engine:OpenAIEngine",
    check,
    "worker.engine.openai.engine:dry_run",
)
