"""Who calls: the tenant that a key belongs to, and what the key allows."""

from dataclasses import dataclass

from contract import naming


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever made a request. `key_id` is '' where the gateway has no keys (loopback only).

    `models` is None for all; `highest_priority` is the smallest number online requests may have.
    """

    tenant: str = naming.DEFAULT_TENANT
    key_id: str = ""
    models: frozenset[str] | None = None
    highest_priority: int = 0
