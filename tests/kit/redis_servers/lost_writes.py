"""A Redis that loses its last writes, as a failover to a replica that lagged behind does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import redis
from kit.commands.support import TTL_MS
from kit.protocol.lessee import client_of

from contract.redis.batches import BatchStore


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


class ForgetfulStore(BatchStore):
    """Runs `before` and `after` around the nth run of a script, for example `enqueue 2`."""

    def __init__(self, whole: BatchStore) -> None:
        super().__init__(client_of(whole), ttl_ms=TTL_MS)
        self.before: dict[str, Callable[[], None]] = {}
        self.after: dict[str, Callable[[], None]] = {}
        self._calls = Counter[str]()

    def _run(self, name: str, *args: Any) -> Any:
        self._calls[name] += 1
        nth = f"{name} {self._calls[name]}"
        self.before.get(nth, lambda: None)()
        reply = super()._run(name, *args)
        self.after.get(nth, lambda: None)()
        return reply


class Memory:
    """What a store has at one moment, to be put back at a later one."""

    def __init__(self, store: BatchStore) -> None:
        self._redis = client_of(store)
        self._snapshot: Snapshot | None = None

    def keep(self) -> None:
        self._snapshot = Snapshot(self._redis)

    def put_back(self) -> None:
        assert self._snapshot is not None
        self._snapshot.restore(self._redis)

    def fail_over(self) -> None:
        """Put it back as a Redis does that was started again: all connections break."""
        self.put_back()
        self._redis.client_kill_filter(_type="normal", skipme=True)
