"""A Redis that loses its last writes, as a failover to a replica that lagged behind does."""

from __future__ import annotations

from typing import Any

import redis


class Snapshot:
    """The keys of a Redis as they were at one moment, or those that `match` a pattern."""

    def __init__(self, client: redis.Redis, match: str = "*") -> None:
        names: list[Any] = list(client.scan_iter(match, count=1000))
        pipe = client.pipeline()
        for name in names:
            pipe.dump(name)
            pipe.pttl(name)
        replies = pipe.execute()
        self._keys = list(zip(names, replies[::2], replies[1::2], strict=True))

    def restore(self, client: redis.Redis, *, alone: bool = True) -> None:
        """Put them back, at once for whoever looks; other keys go, unless they are not `alone`."""
        pipe = client.pipeline(transaction=True)
        if alone:
            pipe.flushdb()
        for name, dump, ttl_ms in self._keys:
            if dump is not None:
                pipe.restore(name, max(0, ttl_ms), dump, replace=True)
        pipe.execute()
