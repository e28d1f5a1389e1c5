"""Makes clients of Redis, sync and asyncio, with the same limits for worker and producer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from inspect import signature
from typing import Any, NamedTuple, cast
from urllib.parse import parse_qs, quote, unquote, urlsplit
from weakref import WeakSet

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

#: Seconds after which a try to connect fails.
CONNECT_TIMEOUT_S = 5.0
#: Seconds after which an unanswered command fails, since a socket may be dead; scripts take ms.
SOCKET_TIMEOUT_S = 20.0
#: Most connections of a client. Threads share it, and each uses a connection during a call. With
#: redis-py's default, 100, further calls would fail while Redis answers slowly.
_MAX_CONNECTIONS = 10_000
#: The names of the options of redis-py's connections; a URL may set them after its ?.
OPTIONS = frozenset(signature(AbstractConnection.__init__).parameters)
#: The characters that CLIENT SETNAME accepts: printable ASCII without the space.
_IN_CLIENT_NAMES = "".join(map(chr, range(ord("!"), ord("~") + 1)))


class SentinelUrl(NamedTuple):
    """The parts of `sentinel://user:pw@h1:26379,h2:26379/DB?master=NAME`.

    User and password are those of the Redis servers, not of the sentinels.
    """

    addresses: list[tuple[str, int]]
    master: str
    db: int
    user: str
    password: str

    @classmethod
    def parse(cls, url: str) -> SentinelUrl:
        """Read a sentinel:// URL; raises ValueError for an invalid one."""
        parts = urlsplit(url)
        addresses = []
        for address in parts.netloc.rpartition("@")[2].split(","):
            host, _, port = address.rpartition(":")
            addresses.append((host.strip("[]"), int(port)))
        master = parse_qs(parts.query).get("master", ["mymaster"])[0]
        return cls(addresses, master, int(parts.path.strip("/") or 0), *credentials_of(url))

    @property
    def options(self) -> dict[str, Any]:
        """redis-py's options for the Redis servers that the sentinels name."""
        login = {"username": self.user or None, "password": self.password} if self.password else {}
        return {"db": self.db, **login}


def credentials_of(url: str) -> tuple[str, str]:
    """Return user and password of a Redis URL, '' for each that is missing."""
    credentials = urlsplit(url).netloc.rpartition("@")[0]
    user, _, password = credentials.partition(":")
    return unquote(user), unquote(password)


class Reconnects:
    """Counts how often connections of a sync client broke and were made again."""

    def __init__(self) -> None:
        self.count = 0
        self._known = WeakSet[Any]()
        self._lock = threading.Lock()

    def __call__(self, connection: Any) -> None:
        """Set up a connection as redis-py does; its pool calls this for each new socket."""
        connection.on_connect()
        with self._lock:
            self.count += connection in self._known
            self._known.add(connection)


def connect(
    url: str,
    name: str,
    retries: int = 12,
    timeout_s: float | None = None,
    retry: Retry | None = None,
) -> redis.Redis:
    """Return a sync client whose calls are retried, for eight seconds by default.

    Its scripts may run twice without harm. `retry` replaces `retries`.
    """
    options: dict[str, Any] = {
        "socket_connect_timeout": timeout_s or CONNECT_TIMEOUT_S,
        "socket_timeout": timeout_s or SOCKET_TIMEOUT_S,
        "retry": retry or Retry(ExponentialBackoff(cap=1, base=0.05), retries),
        "client_name": _client_name(name),
        "max_connections": _MAX_CONNECTIONS,
        "redis_connect_func": Reconnects(),
    }
    if url.startswith("sentinel://"):
        parts = SentinelUrl.parse(url)
        wait_s = timeout_s or CONNECT_TIMEOUT_S
        sentinel: Any = redis.Sentinel(parts.addresses, socket_timeout=wait_s)  # type: ignore[no-untyped-call]
        return cast(redis.Redis, sentinel.master_for(parts.master, **options, **parts.options))
    return redis.Redis.from_url(url, **options)


def _client_name(name: str) -> str:
    """Return a name for CLIENT SETNAME, with the characters that it refuses percent-encoded."""
    return quote(name, _IN_CLIENT_NAMES, errors="backslashreplace")


def _is_of_closed_socket(error: RuntimeError | AttributeError) -> bool:
    """Return whether an error comes from a socket that was reset, or closed by another task."""
    if isinstance(error, AttributeError):  # the connection's writer became None before the write
        return error.obj is None and error.name == "writelines"
    return str(error).startswith("unable to perform operation on")


class Cancellable(AbstractConnection):
    """A connection that never loses the cancellation of the task that uses it.

    redis-py's timeouts may drop a cancellation, or turn it into an error: the task would go on.
    """

    async def connect(self) -> None:
        """Connect, unless connected, and send the client's name."""
        if not self.is_connected:
            await self._cancellable(super().connect())  # type: ignore[no-untyped-call]

    async def send_packed_command(self, *args: Any, **kwargs: Any) -> None:
        """Send a command."""
        await self._cancellable(super().send_packed_command(*args, **kwargs))

    async def read_response(self, *args: Any, **kwargs: Any) -> Any:
        """Read the reply to a command, or a push."""
        return await self._cancellable(super().read_response(*args, **kwargs))

    async def _cancellable(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Await `work`; raise CancelledError if the task was cancelled meanwhile."""
        task = asyncio.current_task()
        before = task.cancelling() if task else 0
        try:
            return await work
        except (RuntimeError, AttributeError) as error:
            if not _is_of_closed_socket(error):
                raise
            raise ConnectionError(f"connection lost: {error}") from error
        finally:
            if task and task.cancelling() > before:
                await self.disconnect(nowait=True)  # the next command would read this one's reply
                raise asyncio.CancelledError


class PackedConnection(Cancellable, redis.asyncio.Connection):
    """Encodes commands with hiredis, since redis-py's asyncio encoder copies each argument."""

    def pack_command(self, *args: Any) -> list[bytes]:
        """Return the command's bytes."""
        return HiredisRespSerializer().pack(*args)  # type: ignore[no-any-return]


def connect_async(url: str, name: str, timeout_s: float = SOCKET_TIMEOUT_S) -> AsyncClient:
    """Return an asyncio client that does not retry; the drain retries some commands itself."""
    options: dict[str, Any] = {
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "socket_timeout": timeout_s,
        "retry": AsyncRetry(NoBackoff(), 0),
        "client_name": _client_name(name),
    }
    if url.startswith("sentinel://"):
        parts = SentinelUrl.parse(url)
        sentinel: Any = redis.asyncio.Sentinel(parts.addresses, socket_timeout=CONNECT_TIMEOUT_S)  # type: ignore[no-untyped-call]
        client = sentinel.master_for(parts.master, AsyncClient, **options, **parts.options)
        return _with_cancellable_connections(client)
    # With maintenance notifications, redis-py does not check whether an idle connection was closed,
    # for example by a restart of Redis, and the next command on it fails.
    options["maint_notifications_config"] = MaintNotificationsConfig(enabled=False)
    # rediss:// and unix:// URLs choose their own connection class.
    client = AsyncClient.from_url(url, connection_class=PackedConnection, **options)
    return _with_cancellable_connections(client)


def _with_cancellable_connections(client: Any) -> AsyncClient:
    """Make a client use a Cancellable subclass of its connection class."""
    used = client.connection_pool.connection_class
    if not issubclass(used, Cancellable):
        client.connection_pool.connection_class = type(used.__name__, (Cancellable, used), {})
    return cast(AsyncClient, client)


def masked(url: str) -> str:
    """Return a Redis URL without its password and options; the URL need not be valid."""
    scheme, separator, rest = url.partition("://")
    # Split at the last @, so that no part of a password with an @ or / in it is shown.
    credentials, at, address = rest.rpartition("@")
    if "?" in credentials:
        return f"{scheme}{separator}***"
    user = credentials.partition(":")[0] if ":" in credentials else ""
    address = address.partition("?")[0]
    return f"{scheme}{separator}{user}:***@{address}" if at else scheme + separator + address
