"""Connections to Redis, sync and async, with the same limits for both sides."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from inspect import signature
from typing import Any, NamedTuple, cast
from urllib.parse import parse_qs, quote, unquote, urlsplit

import redis
import redis.asyncio
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.connection import HiredisRespSerializer
from redis.exceptions import ConnectionError
from redis.maint_notifications import MaintNotificationsConfig
from redis.retry import Retry

from contract.redis.client import AsyncClient

CONNECT_TIMEOUT_S = 5.0
#: A half-open socket must not block for ever; scripts themselves take milliseconds.
SOCKET_TIMEOUT_S = 20.0
#: Threads share a client, and each has a connection while it asks. redis-py's default is 100, and
#: further calls fail while Redis is slow to answer.
_MAX_CONNECTIONS = 10_000
#: Options of redis-py's connections, in a URL too.
OPTIONS = frozenset(signature(AbstractConnection.__init__).parameters)
#: Characters that CLIENT SETNAME accepts: printable ASCII without the space.
_IN_CLIENT_NAMES = "".join(map(chr, range(ord("!"), ord("~") + 1)))


class SentinelUrl(NamedTuple):
    """`sentinel://user:pw@h1:26379,h2:26379/DB?master=NAME`; user and password are the servers'."""

    addresses: list[tuple[str, int]]
    master: str
    db: int
    user: str
    password: str

    @classmethod
    def parse(cls, url: str) -> SentinelUrl:
        """Read the URL; raises ValueError for any other."""
        parts = urlsplit(url)
        addresses = []
        for address in parts.netloc.rpartition("@")[2].split(","):
            host, _, port = address.rpartition(":")
            addresses.append((host.strip("[]"), int(port)))
        master = parse_qs(parts.query).get("master", ["mymaster"])[0]
        return cls(addresses, master, int(parts.path.strip("/") or 0), *credentials_of(url))

    @property
    def options(self) -> dict[str, Any]:
        """redis-py's options for the servers behind the sentinels."""
        login = {"username": self.user or None, "password": self.password} if self.password else {}
        return {"db": self.db, **login}


def credentials_of(url: str) -> tuple[str, str]:
    """Return user and password of a Redis URL, '' where there is none."""
    credentials = urlsplit(url).netloc.rpartition("@")[0]
    user, _, password = credentials.partition(":")
    return unquote(user), unquote(password)


def connect(url: str, name: str, retries: int = 12, timeout_s: float | None = None) -> redis.Redis:
    """Return a sync client that retries for eight seconds: its scripts are repeatable."""
    options: dict[str, Any] = {
        "socket_connect_timeout": timeout_s or CONNECT_TIMEOUT_S,
        "socket_timeout": timeout_s or SOCKET_TIMEOUT_S,
        "retry": Retry(ExponentialBackoff(cap=1, base=0.05), retries),
        "client_name": _client_name(name),
        "max_connections": _MAX_CONNECTIONS,
    }
    if url.startswith("sentinel://"):
        where = SentinelUrl.parse(url)
        wait_s = timeout_s or CONNECT_TIMEOUT_S
        watch: Any = redis.Sentinel(where.addresses, socket_timeout=wait_s)  # type: ignore[no-untyped-call]
        return cast(redis.Redis, watch.master_for(where.master, **options, **where.options))
    return redis.Redis.from_url(url, **options)


def _client_name(name: str) -> str:
    """Return a name for CLIENT SETNAME, percent-encoded where it accepts nothing else."""
    return quote(name, _IN_CLIENT_NAMES, errors="backslashreplace")


def _closed(error: RuntimeError | AttributeError) -> bool:
    """Return whether an error is of a socket that was reset, or closed by another task."""
    if isinstance(error, AttributeError):  # redis-py gets its writer one step before it writes
        return error.obj is None and error.name == "writelines"
    return str(error).startswith("unable to perform operation on")


class Cancellable(AbstractConnection):
    """Never swallows the cancellation of a task that connects, sends a command or reads a reply.

    redis-py's timeouts may drop a cancellation, or turn it into an error, and the task goes on.
    """

    async def connect(self) -> None:
        """Connect, unless it is connected, and name the client."""
        if not self.is_connected:
            await self._cancellable(super().connect())  # type: ignore[no-untyped-call]

    async def send_packed_command(self, *args: Any, **kwargs: Any) -> None:
        """Send a command."""
        await self._cancellable(super().send_packed_command(*args, **kwargs))

    async def read_response(self, *args: Any, **kwargs: Any) -> Any:
        """Read the reply to a command, or a push."""
        return await self._cancellable(super().read_response(*args, **kwargs))

    async def _cancellable(self, work: Coroutine[Any, Any, Any]) -> Any:
        task = asyncio.current_task()
        before = task.cancelling() if task else 0
        try:
            return await work
        except (RuntimeError, AttributeError) as error:
            if not _closed(error):
                raise
            raise ConnectionError(f"connection lost: {error}") from error
        finally:
            if task and task.cancelling() > before:
                await self.disconnect(nowait=True)  # nobody will read the reply
                raise asyncio.CancelledError


class PackedConnection(Cancellable, redis.asyncio.Connection):
    """Writes commands with hiredis: redis-py's asyncio packer copies each argument."""

    def pack_command(self, *args: Any) -> list[bytes]:
        """Return the command's bytes."""
        return HiredisRespSerializer().pack(*args)  # type: ignore[no-any-return]


def connect_async(url: str, name: str, timeout_s: float = SOCKET_TIMEOUT_S) -> AsyncClient:
    """Return an asyncio client that never retries by itself: the drain decides."""
    options: dict[str, Any] = {
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "socket_timeout": timeout_s,
        "retry": AsyncRetry(NoBackoff(), 0),
        "client_name": _client_name(name),
    }
    if url.startswith("sentinel://"):
        where = SentinelUrl.parse(url)
        watch: Any = redis.asyncio.Sentinel(where.addresses, socket_timeout=CONNECT_TIMEOUT_S)  # type: ignore[no-untyped-call]
        return _cancellable(watch.master_for(where.master, AsyncClient, **options, **where.options))
    # Where redis-py subscribes to maintenance notices, it does not check whether an idle connection
    # was closed, as by a restart, and the next command on it fails.
    options["maint_notifications_config"] = MaintNotificationsConfig(enabled=False)
    # A URL with TLS or of a socket has another class.
    return _cancellable(AsyncClient.from_url(url, connection_class=PackedConnection, **options))


def _cancellable(client: Any) -> AsyncClient:
    """Let a client make connections that can be cancelled, whatever their class."""
    made = client.connection_pool.connection_class
    if not issubclass(made, Cancellable):
        client.connection_pool.connection_class = type(made.__name__, (Cancellable, made), {})
    return cast(AsyncClient, client)


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
