"""Keys of the gateways' callers: digests and limits, by digest in one hash, never a key itself; and
who is logged in at the page: a session's digest -> the digest of its key."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from contract.redis.reads import Reads
from gateway.redis.async_calls import AsyncCalls, retry_on_disconnect

#: digest (SHA-256, hex) -> record (JSON).
KEYS = "warmq:gateway:keys"
#: Random bytes of a key: 256 bits cannot be guessed, so a plain SHA-256 hides it well enough.
SECRET_BYTES = 32


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is kept of a key. Limits that are None do not limit; times are in s since 1970.

    `tail` are the last four characters, by which people know a key again. `highest_priority` is
    the smallest number that its online requests may have; an `operator` sees all tenants' load and
    dead letters at the page.
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


class Found(NamedTuple):
    """What a digest stands for: its key, None if it is nobody's or was revoked; and whether any key
    exists."""

    key: ApiKey | None
    any_keys: bool


_decode = msgspec.json.Decoder(ApiKey).decode
_encode = msgspec.json.Encoder().encode


def digest_of(key: str | bytes) -> str:
    """Return the digest under which a key is kept.

    Finding it in a hash compares no characters of the key, so no time tells how many were right.
    """
    return hashlib.sha256(key if isinstance(key, bytes) else key.encode()).hexdigest()


class ApiKeys(Reads):
    """Keys in one Redis. Each call raises StoreUnavailable where it cannot be used."""

    def create(self, tenant: str, **limits: Any) -> tuple[str, ApiKey]:
        """Make a key with a name and limits of ApiKey; return it, this once, and its record."""
        secret = f"sk-{secrets.token_urlsafe(SECRET_BYTES)}"
        key = ApiKey(
            id=f"key_{secrets.token_hex(8)}", tenant=tenant, tail=secret[-4:],
            created_at=int(time.time()), **limits,
        )  # fmt: skip
        self._client.hset(KEYS, digest_of(secret), _encode(key))
        return secret, key

    def all(self) -> list[ApiKey]:
        """Return all keys, the oldest first, also those that were revoked."""
        found = [_decode(record) for record in self._client.hgetall(KEYS).values()]
        return sorted(found, key=lambda key: (key.created_at, key.id))

    def any(self) -> bool:
        """Return whether a key was ever made; one that was revoked counts."""
        return bool(self._client.exists(KEYS))

    def get(self, key_id: str) -> ApiKey | None:
        """Return a key by its id, as work that goes on after its request knows it."""
        return next((key for key in self.all() if key.id == key_id), None)

    def revoke(self, key_id: str) -> ApiKey | None:
        """Take a key's rights, for ever; gateways notice within a second.

        Returns:
            It, with the time of the first revocation; None if there is none of that id.
        """
        for digest, record in self._client.hgetall(KEYS).items():
            key = _decode(record)
            if key.id == key_id:
                if key.revoked_at is None:
                    key = msgspec.structs.replace(key, revoked_at=int(time.time()))
                    self._run("terms_put", KEYS, digest, _encode(key))
                return key
        return None


class KeyLookup(AsyncCalls):
    """Looks keys up."""

    async def find(self, digests: Sequence[str]) -> list[Found]:
        """Return what each digest stands for: one round trip for all."""

        async def ask() -> Any:
            pipe: Any = self._client.pipeline(transaction=False)
            return await pipe.hmget(KEYS, digests).exists(KEYS).execute()

        records, any_keys = await retry_on_disconnect(self._client, ask)
        keys = [_decode(record) if record else None for record in records]
        return [Found(k if k and k.revoked_at is None else None, bool(any_keys)) for k in keys]


#: A session ends so long after its login; whoever still looks logs in again.
LIFE_S = 24 * 3600


class Sessions(AsyncCalls):
    """Sessions at the page.

    Neither a session's token nor a key is kept: who reads Redis can use neither.
    """

    async def begin(self, token: str, key_digest: str) -> None:
        """Remember that a token stands for a key."""
        await self._run("session_put", digest_of(token), key_digest, LIFE_S)

    async def key_digest(self, token: str) -> str:
        """Return the digest of the key that a token stands for; '' if it has none (any more)."""
        found: bytes | None = await self._command("get", _name(token))
        return found.decode() if found else ""

    async def end(self, token: str) -> None:
        """Forget a token."""
        await self._command("del", _name(token))

    async def _command(self, *command: Any) -> Any:
        return await retry_on_disconnect(
            self._client, lambda: self._client.execute_command(*command)
        )


def _name(token: str) -> str:
    return f"warmq:gateway:session:{digest_of(token)}"
