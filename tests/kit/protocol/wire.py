"""Scripts sent over a network that loses replies: what was lost is sent again, at once or later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

import redis
from kit.protocol.lessee import Lessee

from contract.redis.batches import BatchStore
from contract.redis.scripts import source
from worker.drain.leases import Leases


class Fate(Enum):
    """What becomes of one script call."""

    ANSWERED = "it is answered"
    REPEATED = "its reply is lost, and the client sends it again at once"
    LOST = "its reply is lost, and the client gives up; the same command may come once more"
    LATE = "its client is killed, and the command arrives later"


class Cut(Exception):
    """The client has no reply and goes no further."""


#: How many messages go back to their lists in one step, and how many here, where few are leased.
MOVED_AT_ONCE = ("1024 * 1024, 500", "1024 * 1024, 2")


def load(client: redis.Redis, *names: str) -> dict[str, str]:
    """Make scripts known to Redis, with tighter bounds; return their SHAs by name."""
    texts = {name: source(name) for name in names}
    assert all(text.count(MOVED_AT_ONCE[0]) == 1 for text in texts.values())
    return {name: client.script_load(text.replace(*MOVED_AT_ONCE)) for name, text in texts.items()}


@dataclass
class Wire:
    """Sends scripts by their SHA. `fate` is that of the call after `spare` further ones."""

    client: redis.Redis
    shas: dict[str, str]
    fate: Fate = Fate.ANSWERED
    spare: int = 0
    #: Commands that arrive (again) some time.
    late: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    #: What was executed since the last look, and the bytes of its reply.
    sent: list[tuple[str, tuple[Any, ...], Any]] = field(default_factory=list)

    def run(self, name: str, *args: Any) -> Any:
        """Send one script and return its reply.

        Raises:
            Cut: if the reply is lost for good.
        """
        self.spare -= 1
        fate = self.fate if self.spare < 0 else Fate.ANSWERED
        if fate is not Fate.ANSWERED:
            self.fate = Fate.ANSWERED
        if fate is Fate.LATE:
            self.late.append((name, args))
            raise Cut
        reply = self.send(name, args)
        if fate is Fate.REPEATED:
            return self.send(name, args)
        if fate is Fate.LOST:
            self.late.append((name, args))
            raise Cut
        return reply

    def send(self, name: str, args: tuple[Any, ...]) -> Any:
        """Execute a script."""
        reply = self.client.execute_command("EVALSHA", self.shas[name], 0, *args)
        self.sent.append((name, args, reply))
        return reply


class WiredStore(BatchStore):
    """A producer's store on such a network."""

    def __init__(self, wire: Wire, *, ttl_ms: int) -> None:
        super().__init__(wire.client, ttl_ms=ttl_ms)
        self._wire = wire

    def _run(self, name: str, *args: Any) -> Any:
        return self._wire.run(name, *args)


class WiredWorker(Lessee):
    """A worker on such a network; `known` are the leases it knows of, by id."""

    def __init__(self, wire: Wire, name: str, ttl_ms: int) -> None:
        super().__init__(wire.client, name)
        self.ttl_ms = ttl_ms
        self.known: dict[str, Any] = {}
        self._wire = wire

    def run(self, name: str, *args: Any) -> Any:
        """Run one script."""
        return self._wire.run(name, *args)


class AtOnce(Leases):
    """What a worker's side tasks use (worker/drain/leases.py), with every answer at once."""

    def __init__(self, wire: Wire, ttl_ms: int) -> None:
        self.settings = SimpleNamespace(result_ttl_ms=ttl_ms)
        self._client = self
        self.scripts = self
        self._wire = wire

    async def run(self, name: str, *args: Any) -> Any:
        """Run one script."""
        return self._wire.run(name, *args)

    def __getattr__(self, command: str) -> Callable[..., Any]:
        async def call(*args: Any) -> Any:
            return getattr(self._wire.client, command)(*args)

        return call
