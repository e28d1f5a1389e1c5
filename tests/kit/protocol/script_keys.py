"""Keys that only the scripts name: docs/reference/redis-keys.md has their table."""

from __future__ import annotations

from contract.redis.keys import batch_key, worker_key

__all__ = ["kept_key", "leased_key", "worker_key"]


def leased_key(lease: str) -> str:
    """Return the list that holds the message of a lease."""
    return f"warmq:leased:{lease}"


def kept_key(batch_id: str, request_id: str) -> str:
    """Return the list that keeps an ended request's message for RETRY."""
    return batch_key(batch_id, f"kept:{request_id}")
