"""Connections to Redis, sync and async, with the same limits for both sides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import parse_qs, unquote, urlsplit

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.connection import HiredisRespSerializer
from redis.maint_notifications import MaintNotificationsConfig
from redis.retry import Retry

from contract.redis.client import AsyncClient

CONNECT_TIMEOUT_S = 5.0
#: A half-open socket must not block for ever; scripts themselves take milliseconds.
SOCKET_TIMEOUT_S = 20.0
#: Threads share a client, and each has a connection while it asks. redis-py would let 100 ask, and
#: fail the others while Redis is slow to answer.
_MOST_CONNECTIONS = 10_000


@dataclass(frozen=True, slots=True)
class SentinelUrl:
    """`sentinel://user:pw@h1:26379,h2:26379/DB?master=NAME`; the password is the servers'."""

    addresses: list[tuple[str, int]]
    master: str
    db: int
    user: str
    password: str

    @classmethod
    def parse(cls, url: str) -> SentinelUrl:
        """Read the URL.

        Raises:
            ValueError: if it is not such a URL.
        """
        parts = urlsplit(url)
        addresses = []
        for address in parts.netloc.rpartition("@")[2].split(","):
            host, _, port = address.rpartition(":")
            addresses.append((host.strip("[]"), int(port)))
        master = parse_qs(parts.query).get("master", ["mymaster"])[0]
        return cls(addresses, master, int(parts.path.strip("/") or 0), *credentials_of(url))

    @property
    def options(self) -> dict[str, Any]:
        """What redis-py takes for the servers behind the sentinels."""
        login = {"username": self.user or None, "password": self.password} if self.password else {}
        return {"db": self.db, **login}


def credentials_of(url: str) -> tuple[str, str]:
    """Return user and password of a Redis URL, '' where there is none."""
    credentials = urlsplit(url).netloc.rpartition("@")[0]
    user, _, password = credentials.partition(":")
    return unquote(user), unquote(password)


def connect(url: str, name: str, retries: int = 12, timeout_s: float | None = None) -> redis.Redis:
    """Return a sync client. Safe to retry: every script of the producer is idempotent.

    By default it rides out a Redis that is away for eight seconds, as at a restart.
    `timeout_s` is for those who cannot wait as long as the limits above.
    """
    options: dict[str, Any] = {
        "socket_connect_timeout": timeout_s or CONNECT_TIMEOUT_S,
        "socket_timeout": timeout_s or SOCKET_TIMEOUT_S,
        "retry": Retry(ExponentialBackoff(cap=1, base=0.05), retries),
        "client_name": name,
        "max_connections": _MOST_CONNECTIONS,
    }
    if url.startswith("sentinel://"):
        where = SentinelUrl.parse(url)
        wait_s = timeout_s or CONNECT_TIMEOUT_S
        watch: Any = redis.Sentinel(where.addresses, socket_timeout=wait_s)  # type: ignore[no-untyped-call]
        return cast(redis.Redis, watch.master_for(where.master, **options, **where.options))
    return redis.Redis.from_url(url, **options)


class PackedConnection(redis.asyncio.Connection):
    """Writes commands as redis-py's sync connections do, with hiredis.

    Its own asyncio packer copies up to 6 kB for each argument, and a DONE has nine a request.
    """

    def pack_command(self, *args: Any) -> list[bytes]:
        """Return the command's bytes."""
        return HiredisRespSerializer().pack(*args)  # type: ignore[no-any-return]


def connect_async(url: str, name: str, timeout_s: float = SOCKET_TIMEOUT_S) -> AsyncClient:
    """Return an asyncio client that never retries by itself: the drain decides."""
    options: dict[str, Any] = {
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "socket_timeout": timeout_s,
        "retry": AsyncRetry(NoBackoff(), 0),
        "client_name": name,
    }
    if url.startswith("sentinel://"):
        where = SentinelUrl.parse(url)
        watch: Any = redis.asyncio.Sentinel(where.addresses, socket_timeout=CONNECT_TIMEOUT_S)  # type: ignore[no-untyped-call]
        options |= where.options
        return cast(AsyncClient, watch.master_for(where.master, AsyncClient, **options))
    # Where redis-py listens for notices of maintenance, it does not look whether an idle connection
    # was closed, as by a restart, and the next command on it fails.
    options["maint_notifications_config"] = MaintNotificationsConfig(enabled=False)
    # A URL with TLS or of a socket brings a class of its own.
    return cast(
        AsyncClient, AsyncClient.from_url(url, connection_class=PackedConnection, **options)
    )


def masked(url: str) -> str:
    """Return a Redis URL that is safe to log, even if it is not a valid one."""
    scheme, separator, rest = url.partition("://")
    # At the last @: a password with an unescaped @ or / must not be shown in part.
    credentials, at, address = rest.rpartition("@")
    if "?" in credentials:
        return f"{scheme}{separator}***"
    user = credentials.partition(":")[0] if ":" in credentials else ""
    address = address.partition("?")[0]
    return f"{scheme}{separator}{user}:***@{address}" if at else scheme + separator + address
