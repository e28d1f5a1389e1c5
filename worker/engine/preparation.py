"""Counts, for each tenant, the requests that wait to be prepared for the engine.

Before a request runs, its message is read, its prompt tokenized and its grammar compiled. Long
messages and prompts are prepared one after the other, which takes seconds if a client sends many.
A request that waits for its preparation takes no slot of the engine, so that other tenants'
requests can run.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar


class PreparingRequests:
    """Counts waiting requests by tenant; calls `changed` at each change."""

    def __init__(self, changed: Callable[[], None] = lambda: None) -> None:
        self._changed = changed
        self._waiting: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._waiting.total()

    def busy_tenants(self, least: int) -> list[str]:
        """Return the tenants with at least this many waiting requests."""
        return [tenant for tenant, count in self._waiting.items() if count >= least]

    def add(self, tenant: str, change: int) -> None:
        """Add `change` (1 or -1) to a tenant's number of waiting requests."""
        self._waiting[tenant] += change
        if not self._waiting[tenant]:
            del self._waiting[tenant]
        self._changed()


class Preparation:
    """A context of one request: the request waits while any of its tasks is inside the context."""

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


#: The Preparation of the current task's request; tasks that it starts inherit it. None if no drain
#: runs the task.
PREPARATION: ContextVar[Preparation | None] = ContextVar("preparation", default=None)


def waiting() -> AbstractContextManager[None]:
    """Return the context in which the current task's request counts as waiting."""
    return PREPARATION.get() or nullcontext()
