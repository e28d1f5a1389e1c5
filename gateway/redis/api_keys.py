"""Stores API keys and sessions of the page, both by digests.

Neither keys nor session tokens are stored: a reader of Redis can use neither.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from contract.redis.reads import Reads
from gateway.redis.async_calls import AsyncCalls, retry_on_disconnect

#: The hash in Redis: digest of a key (SHA-256, hex) -> record (JSON).
KEYS = "warmq:gateway:keys"
#: Random bytes of a key: 256 bits cannot be guessed, so a plain SHA-256 suffices as digest.
SECRET_BYTES = 32


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The record of a key; times are seconds since 1970.

    A limit is None if there is none. `tail` has the key's last four characters. `highest_priority`
    is the smallest priority number that its requests may have. An `operator` sees the load of all
    tenants on the page, and dead letters that belong to no batch.
    """

    id: str
    tenant: str
    tail: str
    created_at: int
    name: str = ""
    revoked_at: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    enqueued_tokens: int | None = None
    file_bytes: int | None = None
    models: tuple[str, ...] | None = None
    highest_priority: int = 0
    operator: bool = False


class FoundKey(NamedTuple):
    """The key of a digest (None: unknown or revoked), and whether any key exists."""

    key: ApiKey | None
    any_keys: bool


_decode = msgspec.json.Decoder(ApiKey).decode
_encode = msgspec.json.Encoder().encode


def digest_of(key: str | bytes) -> str:
    """Return a key's digest; a lookup by digest takes the same time for any key."""
    return hashlib.sha256(key if isinstance(key, bytes) else key.encode()).hexdigest()


class ApiKeys(Reads):
    """Stores API keys in one Redis. Calls raise StoreUnavailable."""

    def create(self, tenant: str, **limits: Any) -> tuple[str, ApiKey]:
        """Create a key; return the key, which is not stored, and its record."""
        secret = f"sk-{secrets.token_urlsafe(SECRET_BYTES)}"
        key = ApiKey(
            id=f"key_{secrets.token_hex(8)}", tenant=tenant, tail=secret[-4:],
            created_at=int(time.time()), **limits,
        )  # fmt: skip
        self._client.hset(KEYS, digest_of(secret), _encode(key))
        return secret, key

    def all(self) -> list[ApiKey]:
        """Return all keys, the oldest first, revoked ones included."""
        keys = [_decode(record) for record in self._client.hgetall(KEYS).values()]
        return sorted(keys, key=lambda key: (key.created_at, key.id))

    def any(self) -> bool:
        """Return whether a key was ever created, revoked or not."""
        return bool(self._client.exists(KEYS))

    def get(self, key_id: str) -> ApiKey | None:
        return next((key for key in self.all() if key.id == key_id), None)

    def revoke(self, key_id: str) -> ApiKey | None:
        """Revoke a key for ever; return it, None if unknown. Gateways notice within a second."""
        for digest, record in self._client.hgetall(KEYS).items():
            key = _decode(record)
            if key.id == key_id:
                if key.revoked_at is None:
                    key = msgspec.structs.replace(key, revoked_at=int(time.time()))
                    self._run("terms_put", KEYS, digest, _encode(key))
                return key
        return None


class KeyLookup(AsyncCalls):
    async def find(self, digests: Sequence[str]) -> list[FoundKey]:
        async def ask() -> Any:
            pipe: Any = self._client.pipeline(transaction=False)
            return await pipe.hmget(KEYS, digests).exists(KEYS).execute()

        records, any_keys = await retry_on_disconnect(self._client, ask)
        keys = [_decode(record) if record else None for record in records]
        return [FoundKey(k if k and k.revoked_at is None else None, bool(any_keys)) for k in keys]


#: Seconds from a login to the end of its session.
LIFE_S = 24 * 3600


class Sessions(AsyncCalls):
    """Stores sessions of the page: digest of a session's token -> digest of a key."""

    async def begin(self, token: str, key_digest: str) -> None:
        await self._run("session_put", digest_of(token), key_digest, LIFE_S)

    async def key_digest(self, token: str) -> str:
        """Return the digest of a token's key, or ''."""
        digest: bytes | None = await self._command("get", _session_key(token))
        return digest.decode() if digest else ""

    async def end(self, token: str) -> None:
        await self._command("del", _session_key(token))

    async def _command(self, *command: Any) -> Any:
        return await retry_on_disconnect(
            self._client, lambda: self._client.execute_command(*command)
        )


def _session_key(token: str) -> str:
    return f"warmq:gateway:session:{digest_of(token)}"
