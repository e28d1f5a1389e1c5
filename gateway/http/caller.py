"""Who calls: the tenant that a key belongs to, and what the key allows."""

from __future__ import annotations

from dataclasses import dataclass

from contract import naming
from gateway.redis.api_keys import ApiKey


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever made a request. `key_id` is '' where the gateway has no keys (loopback only).

    `models` is None for all; `highest_priority` is the smallest number online requests may have.
    An operator sees the whole fleet at the page: all tenants' load, dead letters, reasons.
    Limits are None where there is none: requests and tokens a minute of the key's online requests,
    `enqueued_tokens` that the tenant's batches may hold of one model, `file_bytes` of its files.
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
        """Return the caller that a key stands for."""
        return cls(
            tenant=key.tenant,
            key_id=key.id,
            operator=key.operator,
            models=None if key.models is None else frozenset(key.models),
            highest_priority=key.highest_priority,
            requests_per_minute=key.requests_per_minute,
            tokens_per_minute=key.tokens_per_minute,
            enqueued_tokens=key.enqueued_tokens,
            file_bytes=key.file_bytes,
        )

    def may_use(self, model: str) -> bool:
        """Return whether the key allows a model."""
        return self.models is None or model in self.models
