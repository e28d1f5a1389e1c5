"""What is an address, and what a Redis URL: found out before anything is connected."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from pydantic import SecretStr

#: Ten years: more than anybody needs, and far from where the milliseconds of Redis' PEXPIRE,
#: Lua's numbers and Python's timers end.
LONGEST_S = 10 * 365 * 86_400
_SCHEMES = ("redis://", "rediss://", "unix://", "sentinel://")


def redis_url(url: SecretStr) -> SecretStr:
    """Return WARMQ_REDIS_URL.

    Raises:
        ValueError: no connection can be made of it; says why, without the URL.
    """
    if not url.get_secret_value().startswith(_SCHEMES):
        raise ValueError(f"must start with one of {', '.join(_SCHEMES)}")
    if not (_readable(url.get_secret_value()) and _connects(url.get_secret_value())):
        # Said here, without the URL: what libraries say of it may quote the password's pieces.
        raise ValueError(
            "not a Redis URL; percent-encode what is special in the password. "
            "Write redis://user:password@host:6379/0"
        )
    return url


def _readable(url: str) -> bool:
    """Say whether every part is where it belongs: no `/`, `#` or `@` of a password has moved it."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    if "@" in parts.path or parts.fragment or not url.isprintable():
        return False
    if parts.scheme == "unix":
        return parts.path not in ("", "/")
    database = parts.path.strip("/")
    hosts = parts.netloc.rpartition("@")[2].split(",")
    if database and not (database.isascii() and database.isdecimal()):
        return False
    return all(is_address(host, with_port=parts.scheme == "sentinel") for host in hosts)


def is_address(address: str, with_port: bool = False) -> bool:
    """Say whether this is `host:port` that can be looked up; `host`, `:port` and '' may do, too."""
    host, colon, port = address.rpartition(":")
    if not colon or "]" in port:
        host, port = address, ""
    try:
        host.encode("idna")  # as every look-up does, which fails outside of OSError if it cannot
    except UnicodeError:
        return False
    if port == "":
        return not with_port
    return port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 2**16


def _connects(url: str) -> bool:
    """Say whether redis-py understands the URL and its `?options`; nothing is connected."""
    from contract.redis.connect import connect, connect_async  # noqa: PLC0415 - it reads the settings

    try:
        for client in (connect(url, "check"), connect_async(url, "check")):
            connection: Any = client.connection_pool.make_connection()
            for limit in (connection.socket_timeout, connection.socket_connect_timeout):
                if limit is not None and not 0 < limit <= LONGEST_S:
                    return False
    except Exception:  # whatever it raises, the URL is the cause
        return False
    return True
