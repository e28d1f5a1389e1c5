"""Checks Redis URLs and addresses before the first connection."""

from typing import Any
from urllib.parse import SplitResult, parse_qsl, urlsplit

from pydantic import SecretStr

from contract.redis.connect import OPTIONS, connect, connect_async

#: The longest time in seconds, ten years. It is far below the limits of Redis's PEXPIRE (in ms),
#: Lua's numbers and Python's timers.
LONGEST_S = 10 * 365 * 86_400
#: Most digits of a database's number, which is an int in Redis.
LONGEST_DATABASE = 9
#: The options of redis-py's connections that a URL may have after its ?, in addition to ssl_*. Any
#: other option changes the types of replies, or is set by warmq.
_OPTIONS = {
    "db", "health_check_interval", "password", "retry_on_timeout", "socket_connect_timeout",
    "socket_keepalive", "socket_read_size", "socket_timeout", "username",
}  # fmt: skip
_REFUSED = OPTIONS - _OPTIONS
_SCHEMES = ("redis://", "rediss://", "unix://", "sentinel://")
_NOT_A_URL = (
    "not a Redis URL; percent-encode special characters of the password. "
    "Write redis://user:password@host:6379/0"
)


def redis_url(secret: SecretStr) -> SecretStr:
    """Check and return WARMQ_REDIS_URL.

    Raises:
        ValueError: the URL is invalid; the error's text has no part of it.
    """
    url = secret.get_secret_value()
    if not url.startswith(_SCHEMES):
        raise ValueError(f"must start with one of {', '.join(_SCHEMES)}")
    try:
        parts = urlsplit(url)
        names = [name for name, _ in parse_qsl(parts.query, keep_blank_values=True)]
    except ValueError:  # urllib's message may have a part of the password
        raise ValueError(_NOT_A_URL) from None
    database = parts.path.strip("/")
    if parts.scheme != "unix" and database and not _is_number(database):
        raise ValueError(
            "the database, behind the host and a /, must be a number; percent-encode special "
            "characters of the password. Write redis://user:password@host:6379/0"
        )
    if option := next((name for name in names if name in _REFUSED), ""):
        raise ValueError(f"remove the option {option} behind the ?: warmq sets it, or needs none")
    if not (_has_parts(url, parts) and _is_accepted(url)):
        raise ValueError(_NOT_A_URL)
    return secret


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= LONGEST_DATABASE


def _has_parts(url: str, parts: SplitResult) -> bool:
    """Return whether the parts are right, also if the password has a `/`, `#` or `@`."""
    if "@" in parts.path or parts.fragment or not url.isprintable():
        return False
    if parts.scheme == "unix":
        return parts.path not in ("", "/")
    hosts = parts.netloc.rpartition("@")[2].split(",")
    return all(is_address(host, with_port=parts.scheme == "sentinel") for host in hosts)


def is_address(address: str, with_port: bool = False) -> bool:
    """Return whether a text is `host:port` with a valid host; `:port` may be missing.

    `with_port`: `:port` is required.
    """
    host, colon, port = address.rpartition(":")
    if not colon or "]" in port:
        host, port = address, ""
    if any(character.isspace() for character in host):
        return False
    try:
        host.encode("idna")  # DNS look-ups do the same, and would raise UnicodeError
    except UnicodeError:
        return False
    if port == "":
        return not with_port
    return port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 2**16


def _is_accepted(url: str) -> bool:
    """Return whether redis-py accepts the URL and its options; make no connection."""
    try:
        for client in (connect(url, "check"), connect_async(url, "check")):
            connection: Any = client.connection_pool.make_connection()
            for limit in (connection.socket_timeout, connection.socket_connect_timeout):
                if limit is not None and not 0 < limit <= LONGEST_S:
                    return False
    except Exception:  # an error of any type here is caused by the URL
        return False
    return True
