"""Defines the caller of a request: the tenant of its key, and the key's limits."""

from __future__ import annotations

from dataclasses import dataclass

from contract import naming
from gateway.redis.api_keys import ApiKey


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request; `key_id` is '' if the gateway has no keys.

    `models` is None if the key allows all models. `highest_priority` is the smallest priority
    number that the caller's requests may have. An operator sees all tenants on the page. A limit is
    None if there is none. `requests_per_minute` and `tokens_per_minute` hold for the key;
    `enqueued_tokens` (of batches, for one model) and `file_bytes` hold for the tenant.
    """

    tenant: str = naming.DEFAULT_TENANT
    key_id: str = ""
    operator: bool = False
    models: frozenset[str] | None = None
    highest_priority: int = 0
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    enqueued_tokens: int | None = None
    file_bytes: int | None = None

    @classmethod
    def of(cls, key: ApiKey) -> Caller:
        """Return the caller of a key."""
        return cls(
            key.tenant, key.id, key.operator, None if key.models is None else frozenset(key.models),
            key.highest_priority, key.requests_per_minute, key.tokens_per_minute,
            key.enqueued_tokens, key.file_bytes,
        )  # fmt: skip

    @property
    def owner(self) -> str:
        """The key's id, or else the tenant. Rates and Idempotency-Keys belong to it."""
        return self.key_id or self.tenant

    @property
    def only_tenant(self) -> str:
        """The only tenant whose batches the caller may read; '' for all, if there are no keys."""
        return self.tenant if self.key_id else ""

    def may_use(self, model: str) -> bool:
        """Return whether the key allows a model."""
        return self.models is None or model in self.models
