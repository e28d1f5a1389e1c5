"""What values the worker's settings take, where a number's bounds do not say it."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, SecretStr

from contract.redis.url import is_address
from contract.settings import Line, Seconds


def engine_words(engine_args: str) -> list[str]:
    """Return the words of WARMQ_ENGINE_ARGS, cut as a shell cuts them.

    Raises:
        ValueError: a quote is not closed, or a backslash is the last character.
    """
    try:
        return shlex.split(engine_args)
    except ValueError as error:
        raise ValueError(f"{error}; write it as in a shell, with every quote closed") from None


def _engine_args(text: str) -> str:
    if not "".join(text.split()).isprintable():
        raise ValueError("must have printable characters only")
    engine_words(text)
    return text


def _name(text: str) -> str:
    if text.startswith("-"):
        raise ValueError("must not begin with -, as an option does")
    return text


def _key(key: SecretStr) -> SecretStr:
    text = key.get_secret_value()
    if not (text.isascii() and text.isprintable()):
        raise ValueError("must be printable ASCII, for it is sent in an HTTP header")
    return key


def _addresses(addresses: str) -> str:
    hosts = [one.strip().removeprefix("grpcs://").removeprefix("grpc://")
             for one in addresses.split(",") if one.strip()]  # fmt: skip
    if not hosts or not all("/" in host or is_address(host) for host in hosts):
        raise ValueError("must name host:port or grpcs://host:port")
    return addresses


def _step(seconds: float) -> float:
    if 0 < seconds < 0.0001:
        raise ValueError("must be 0 or at least 0.0001")
    return seconds


def _log_file(path: Path) -> Path:
    # Not Path's own: they raise for names that are too long.
    if os.path.isdir(path) or not os.path.isdir(path.parent):  # noqa: PTH112
        raise ValueError("must name a file in a folder that exists")
    return path


def is_base_url(url: str) -> bool:
    """Say whether this is an http:// or https:// URL without credentials."""
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        return False
    if parts.scheme not in ("http", "https") or not host or "@" in url or " " in url:
        return False
    return is_address(parts.netloc)


Name = Annotated[Line, AfterValidator(_name)]
EngineArgs = Annotated[str, AfterValidator(_engine_args)]
Addresses = Annotated[Line, AfterValidator(_addresses)]
HeaderSecret = Annotated[SecretStr, AfterValidator(_key)]
Step = Annotated[Seconds, AfterValidator(_step)]
LogFile = Annotated[Path, AfterValidator(_log_file)]
