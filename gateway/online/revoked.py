"""Ends online requests whose key is revoked while they run: a stream may last an hour."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from contract.errors import WarmqError
from gateway.http.errors import ApiError
from gateway.online.waiter import Waiter
from gateway.redis.api_keys import KeyLookup

#: Between two looks at the keys of what runs, in seconds.
CHECK_S = 2.0


class Revocations:
    """The keys of one process' online requests, looked up together as long as any runs."""

    def __init__(self, lookup: KeyLookup) -> None:
        self._lookup = lookup
        self._waiters: dict[str, set[Waiter]] = {}

    @contextmanager
    def ending(self, digest: str, waiter: Waiter) -> Iterator[None]:
        """Within it a request ends when the key of this digest is revoked; '' is no key."""
        if not digest:
            yield
            return
        waiters = self._waiters.setdefault(digest, set())
        waiters.add(waiter)
        try:
            yield
        finally:
            waiters.remove(waiter)
            if not waiters:
                self._waiters.pop(digest, None)

    async def run(self) -> None:
        """Look until cancelled. While Redis is away nobody's key is known to be revoked."""
        while True:
            await asyncio.sleep(CHECK_S)
            digests = [*self._waiters]
            if not digests:
                continue
            try:
                found = await self._lookup.find(digests)
            except WarmqError:
                continue
            for digest, one in zip(digests, found, strict=True):
                if one.key is None or one.key.revoked_at is not None:
                    for waiter in tuple(self._waiters.get(digest, ())):
                        waiter.end(_revoked())


def _revoked() -> ApiError:
    told = "the key was revoked while its request ran; the request was given up"
    return ApiError(401, told, code="invalid_api_key", type="invalid_request_error", retry=False)
