"""Requests that are made ready for an engine, and wait for each other meanwhile.

Large messages are read, long prompts made tokens of, and grammars compiled one after the other, for
which a client can make a worker need seconds each. A request that waits for that takes none of the
engine's slots, so it keeps no request of another tenant out.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar


class PreparingRequests:
    """How many requests wait so, by tenant; `changed` is called when one begins or ends to."""

    def __init__(self, changed: Callable[[], None] = lambda: None) -> None:
        self._changed = changed
        self._waiting: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._waiting.total()

    def busy_tenants(self, most: int) -> list[str]:
        """Return the tenants of which so many requests wait, or more."""
        return [tenant for tenant, count in self._waiting.items() if count >= most]

    def add(self, tenant: str, change: int) -> None:
        """Count one more, or one less."""
        self._waiting[tenant] += change
        if not self._waiting[tenant]:
            del self._waiting[tenant]
        self._changed()


class Preparation:
    """One request's; it waits while any of its tasks is within."""

    __slots__ = ("_depth", "_of", "_tenant")

    def __init__(self, of: PreparingRequests, tenant: str) -> None:
        self._of, self._tenant, self._depth = of, tenant, 0

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._of.add(self._tenant, 1)

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._of.add(self._tenant, -1)


#: That of the request which the task runs, and the tasks that it makes; None outside a drain.
PREPARATION: ContextVar[Preparation | None] = ContextVar("preparation", default=None)


def waiting() -> AbstractContextManager[None]:
    """Return what the task's request enters while it waits for others."""
    return PREPARATION.get() or nullcontext()
