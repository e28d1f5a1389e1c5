"""Checks of addresses and Redis URLs, made before anything is connected."""

from typing import Any
from urllib.parse import parse_qsl, urlsplit

from pydantic import SecretStr

from contract.redis.connect import OPTIONS, connect, connect_async

#: Ten years: far below the limits of Redis' PEXPIRE (in ms), Lua's numbers and Python's timers.
LONGEST_S = 10 * 365 * 86_400
#: Digits of a database's number; Redis counts them in an int.
LONGEST_DATABASE = 9
#: Options of redis-py's connections that may stand behind a URL's ?, beside ssl_*. Others change
#: the types of replies, or what warmq itself sets.
_OPTIONS = {
    "db", "health_check_interval", "password", "retry_on_timeout", "socket_connect_timeout",
    "socket_keepalive", "socket_read_size", "socket_timeout", "username",
}  # fmt: skip
_REFUSED = OPTIONS - _OPTIONS
_SCHEMES = ("redis://", "rediss://", "unix://", "sentinel://")


def redis_url(url: SecretStr) -> SecretStr:
    """Return WARMQ_REDIS_URL.

    Raises:
        ValueError: redis-py cannot connect to it; the text says why, and does not quote it.
    """
    if not url.get_secret_value().startswith(_SCHEMES):
        raise ValueError(f"must start with one of {', '.join(_SCHEMES)}")
    if not _database_is_number(url.get_secret_value()):
        raise ValueError(
            "the database, behind the host and a /, must be a number; what is special in the "
            "password is percent-encoded. Write redis://user:password@host:6379/0"
        )
    if option := _refused_option(url.get_secret_value()):
        raise ValueError(f"remove the option {option} behind the ?: warmq sets it, or needs none")
    if not (_readable(url.get_secret_value()) and _connects(url.get_secret_value())):
        # The libraries' own messages may quote a part of the password.
        raise ValueError(
            "not a Redis URL; percent-encode what is special in the password. "
            "Write redis://user:password@host:6379/0"
        )
    return url


def _database_is_number(url: str) -> bool:
    """Say whether the part behind the host is a number or empty; a socket's URL has none."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return True  # another sentence says what is wrong with it
    database = parts.path.strip("/")
    return parts.scheme == "unix" or not database or _is_number(database)


def _refused_option(url: str) -> str:
    """Return the first option that warmq does not take, '' if there is none."""
    try:
        names = [name for name, _ in parse_qsl(urlsplit(url).query, keep_blank_values=True)]
    except ValueError:
        return ""  # another sentence says what is wrong with it
    return next((name for name in names if name in _REFUSED), "")


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= LONGEST_DATABASE


def _readable(url: str) -> bool:
    """Say whether it has the expected parts: a `/`, `#` or `@` in a password would shift them."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    if "@" in parts.path or parts.fragment or not url.isprintable():
        return False
    if parts.scheme == "unix":
        return parts.path not in ("", "/")
    hosts = parts.netloc.rpartition("@")[2].split(",")
    return all(is_address(host, with_port=parts.scheme == "sentinel") for host in hosts)


def is_address(address: str, with_port: bool = False) -> bool:
    """Say whether this is `host:port` with a valid name; both parts are needed if `with_port`."""
    host, colon, port = address.rpartition(":")
    if not colon or "]" in port:
        host, port = address, ""
    if any(character.isspace() for character in host):
        return False
    try:
        host.encode("idna")  # as every DNS look-up does, which raises no OSError if it fails here
    except UnicodeError:
        return False
    if port == "":
        return not with_port
    return port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 2**16


def _connects(url: str) -> bool:
    """Say whether redis-py understands the URL and its `?options`; nothing is connected."""

    try:
        for client in (connect(url, "check"), connect_async(url, "check")):
            connection: Any = client.connection_pool.make_connection()
            for limit in (connection.socket_timeout, connection.socket_connect_timeout):
                if limit is not None and not 0 < limit <= LONGEST_S:
                    return False
    except Exception:  # of whatever type, it comes from the URL
        return False
    return True
