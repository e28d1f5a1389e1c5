"""Requests that wait for each other while they are prepared for an engine.

Large messages are read, long prompts tokenized and grammars compiled one after the other, and a
client can make that take seconds. A request that waits for it takes no slot of the engine, so it
keeps no request of another tenant out.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar


class PreparingRequests:
    """Counts waiting requests by tenant; `changed` is called at each change."""

    def __init__(self, changed: Callable[[], None] = lambda: None) -> None:
        self._changed = changed
        self._waiting: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._waiting.total()

    def busy_tenants(self, least: int) -> list[str]:
        """Return the tenants with at least this many waiting requests."""
        return [tenant for tenant, count in self._waiting.items() if count >= least]

    def add(self, tenant: str, change: int) -> None:
        """Count one more, or one fewer."""
        self._waiting[tenant] += change
        if not self._waiting[tenant]:
            del self._waiting[tenant]
        self._changed()


class Preparation:
    """One request's preparation: it waits while any of its tasks is within."""

    __slots__ = ("_depth", "_requests", "_tenant")

    def __init__(self, requests: PreparingRequests, tenant: str) -> None:
        self._requests, self._tenant, self._depth = requests, tenant, 0

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._requests.add(self._tenant, 1)

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._requests.add(self._tenant, -1)


#: That of the task's request, which the tasks it makes inherit; None outside a drain.
PREPARATION: ContextVar[Preparation | None] = ContextVar("preparation", default=None)


def waiting() -> AbstractContextManager[None]:
    """Return the context in which the task's request waits."""
    return PREPARATION.get() or nullcontext()
