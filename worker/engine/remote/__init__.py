"""One fleet of servers for every engine whose model runs on other machines."""

import asyncio
from collections.abc import Callable
from typing import Any, Generic

from pydantic import Field

from contract.errors import EngineDead
from contract.settings import Seconds
from worker.engine import Capacity
from worker.engine.remote.fleet import Fleet, S
from worker.engine.shutdown import close_on
from worker.engine.spec import Preflight
from worker.machine.finding import Finding
from worker.settings import WorkerSettings


class RemoteSettings(WorkerSettings):
    """What an engine in front of servers can be told."""

    remote_wait_s: Seconds | None = Field(
        None,
        gt=0,
        description="openai, triton: how long a start waits for a server; default no end",
    )


class RemoteEngine(Generic[S]):
    """What the engines in front of servers share: questions about health go to the fleet."""

    grace_s = 0.0

    def __init__(self, settings: RemoteSettings) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fleet: Fleet[S] = Fleet(settings.stall_timeout_s, settings.remote_wait_s)

    def build(self) -> None:
        """Load what is needed here; blocking, called in the engine's own thread."""
        raise NotImplementedError

    async def start(self) -> Capacity:
        """Wait until a server is well."""
        raise NotImplementedError

    def away(self) -> str:
        """Return the servers that are away, each with its reason; '' if none is."""
        return self._fleet.away

    def waits_for(self) -> str:
        """Return the servers that a start or requests wait for, each with its reason."""
        return f"waits for {self._fleet.troubles}" if self._fleet.troubles else ""

    def dead(self) -> bool:
        """Whether every server is away."""
        return self._fleet.dead

    def last_progress(self) -> float:
        """Return when a server last made a step; now, if no request is in any."""
        return self._fleet.last_progress()

    def on_text(self, call: Callable[[], None]) -> None:
        """Call this with each step of a server: then it has sent more."""
        for server in self._fleet.servers:
            server.stepped = call

    def kill(self) -> None:
        """Give up every server; what is in them ends with EngineDead."""
        self._fleet.kill()

    def shutdown(self) -> None:
        """Close every connection; called in the engine's thread."""
        if self._loop is not None:
            close_on(self._loop, self._close())

    async def _close(self) -> None:
        await self._fleet.close()


def described(kind: str, servers: str, model: str, each: object) -> Preflight:
    """Return what is known of an engine in front of servers before any was asked."""
    return Preflight(
        {
            "platform": f"{kind} servers, nothing runs here",
            "servers": servers,
            "model": model,
            "capacity": f"{each} at once at each server",
        }
    )


def ask_once(
    make: Callable[[Any], RemoteEngine[Any]], settings: RemoteSettings, seen: Preflight
) -> None:
    """Start an engine that waits for nobody, and add to `seen` what its servers say.

    Raises:
        SettingsError: as the start would.
    """
    engine = make(settings.model_copy(update={"remote_wait_s": 0.0}))

    async def start() -> Capacity:
        try:
            engine.build()
            return await engine.start()
        finally:
            await asyncio.to_thread(engine.shutdown)  # it closes on this loop

    try:
        capacity = asyncio.run(start())
    except EngineDead:
        problem = f"no server is ready: {engine.away()}"
        remedy = "Start one, or correct its address; a worker that starts now waits for it"
        seen.found.append(Finding(problem, remedy))
        return
    seen.rows["model"] = capacity.model
    if away := engine.away():
        remedy = "Requests go to the others until it is"
        seen.found.append(Finding(f"a server is not ready: {away}", remedy, fatal=False))
