"""Changes redis-py's clients: they raise StoreUnavailable, and run Lua scripts by name.

Commands, pipelines and subscriptions raise only StoreUnavailable and its subclasses.
"""

import re
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import redis
import redis.asyncio
from redis import exceptions
from redis.asyncio.client import Pipeline as AsyncPipeline
from redis.asyncio.client import PubSub
from redis.client import Pipeline
from redis.client import PubSub as SyncPubSub

from contract.errors import (
    StoreForbidden,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
    StoreUnreachable,
)
from contract.redis.scripts import sha, source, timed

_AsyncMethod = Callable[..., Coroutine[Any, Any, Any]]
_ERRORS = (exceptions.RedisError, OSError)
#: Errors caused by a command's arguments or a key's type, which a retry would get again.
_FINAL = re.compile(
    "WRONGTYPE|Protocol error|"
    "^(ERR )?(string exceeds|value is not|hash value is not|increment or decrement)"
)
#: The remedies of Redis's errors, by a part of their text.
_REMEDIES = {
    "DB index is out of range": "correct the number behind the / in WARMQ_REDIS_URL",
    "NOREPLICAS": "this primary has fewer replicas than its min-replicas-to-write: start them",
    "MISCONF": "Redis cannot write to its disk: read its log, and free disk space",
}
_FINAL_REMEDIES = {
    "WRONGTYPE": "another program uses a key of warmq's: give that program another database"
}
_IN_SCRIPT = re.compile(r"Error running script .*: -([A-Z]+ .*)")
_CHECK_LOGIN = "check user, password and ACL in WARMQ_REDIS_URL"


def translated(error: Exception) -> StoreUnavailable:
    """Return warmq's error for an error of redis-py, with a remedy for the operator."""
    text = str(error) or type(error).__name__
    if inner := _IN_SCRIPT.search(text):  # Redis 6 adds text to an error in a script
        text = inner[1]
    kind, remedy = StoreUnavailable, "is Redis running, and is WARMQ_REDIS_URL right?"
    if text.startswith("OOM") or "maxmemory" in text:
        kind = StoreFull
        remedy = "Redis is full: collect and delete finished batches, or raise maxmemory"
    elif word := next((word for word in _REMEDIES if word in text), ""):
        remedy = _REMEDIES[word]
    elif _is_read_only(error):
        remedy = "this server is a replica: point WARMQ_REDIS_URL at the primary"
    elif isinstance(error, exceptions.ResponseError) and _FINAL.search(text):
        kind = StoreRefused
        remedy = _FINAL_REMEDIES.get(text.split()[0], "sending it again does not help")
    elif isinstance(error, exceptions.NoPermissionError) or "NOPERM" in text:
        kind, remedy = StoreForbidden, _CHECK_LOGIN
    elif text.startswith("Timeout reading"):
        remedy = "Redis or this machine is busy, or the network fails"
    elif isinstance(error, exceptions.ConnectionError):
        kind = StoreUnreachable
        if isinstance(error, exceptions.AuthenticationError):
            remedy = _CHECK_LOGIN
    return kind(f"Redis: {text} ({remedy})")


def _is_read_only(error: Exception) -> bool:
    return isinstance(error, exceptions.ReadOnlyError) or "READONLY" in str(error)


def _raise_unless_unknown(error: StoreUnavailable) -> None:
    """Raise an error of EVALSHA, unless it is that Redis does not know the script."""
    if not isinstance(error.__cause__, exceptions.NoScriptError):
        raise error


def _translates(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that raises warmq's errors where `method` raises redis-py's."""

    def call(*args: Any, **options: Any) -> Any:
        try:
            return method(*args, **options)
        except _ERRORS as error:
            raise translated(error) from error

    return call


def _async_translates(method: _AsyncMethod) -> _AsyncMethod:
    """Return a coroutine method that raises warmq's errors where `method` raises redis-py's."""

    async def call(self: Any, *args: Any, **options: Any) -> Any:
        try:
            return await method(self, *args, **options)
        except _ERRORS as error:
            if _is_read_only(error):
                # The server has become a replica; a new connection may be to the primary.
                await self.connection_pool.disconnect(inuse_connections=False)
            raise translated(error) from error

    return call


class _Pipeline(Pipeline):
    execute = _translates(Pipeline.execute)


class _SyncPubSub(SyncPubSub):
    execute_command = _translates(SyncPubSub.execute_command)
    parse_response = _translates(SyncPubSub.parse_response)


class Client(redis.Redis):
    """redis-py's sync client with warmq's errors and scripts."""

    execute_command = _translates(redis.Redis.execute_command)

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Pipeline:
        return _Pipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)

    def pubsub(self, **options: Any) -> SyncPubSub:
        return _SyncPubSub(self.connection_pool, **options)

    def run_script(self, name: str, *args: Any) -> Any:
        """Run a script of a folder `lua` and return its reply."""
        with timed(name):
            try:
                return self.execute_command("EVALSHA", sha(name), 0, *args)
            except StoreUnavailable as error:
                _raise_unless_unknown(error)
            self.execute_command("SCRIPT LOAD", source(name))
            return self.execute_command("EVALSHA", sha(name), 0, *args)

    def run_scripts(self, name: str, calls: Sequence[Sequence[Any]]) -> list[Any]:
        """Run a script once for each of `calls`, in one round trip; a retry may run it twice."""
        with timed(name):
            try:
                return self._run_scripts(name, calls)
            except StoreUnavailable as error:
                _raise_unless_unknown(error)
            self.execute_command("SCRIPT LOAD", source(name))
            return self._run_scripts(name, calls)

    def _run_scripts(self, name: str, calls: Sequence[Sequence[Any]]) -> list[Any]:
        pipe = self.pipeline(transaction=False)
        for args in calls:
            pipe.evalsha(sha(name), 0, *args)
        replies: list[Any] = pipe.execute(raise_on_error=False)
        for error in replies:
            if isinstance(error, exceptions.RedisError):
                raise translated(error) from error
        return replies


class _AsyncPipeline(AsyncPipeline):
    execute = _async_translates(AsyncPipeline.execute)


class _PubSub(PubSub):
    execute_command = _async_translates(PubSub.execute_command)
    parse_response = _async_translates(PubSub.parse_response)


class AsyncClient(redis.asyncio.Redis):
    """redis-py's asyncio client with warmq's errors and scripts."""

    execute_command = _async_translates(redis.asyncio.Redis.execute_command)

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> AsyncPipeline:
        pool, callbacks = self.connection_pool, self.response_callbacks
        return _AsyncPipeline(pool, callbacks, transaction, shard_hint)

    def pubsub(self, **options: Any) -> PubSub:
        return _PubSub(self.connection_pool, **options)

    async def run_script(self, name: str, *args: Any) -> Any:
        """Run a script of a folder `lua` and return its reply."""
        with timed(name):
            try:
                return await self.execute_command("EVALSHA", sha(name), 0, *args)
            except StoreUnavailable as error:
                _raise_unless_unknown(error)
            await self.execute_command("SCRIPT LOAD", source(name))
            return await self.execute_command("EVALSHA", sha(name), 0, *args)
