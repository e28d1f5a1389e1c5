"""Base of the engines whose model runs on servers (openai and triton)."""

import asyncio
from collections.abc import Callable
from functools import cached_property
from typing import Any, Generic

from pydantic import Field

from contract.errors import EngineDead
from contract.redis.announcements import WAITS_FOR
from contract.settings import Seconds
from worker.engine import Capacity
from worker.engine.remote.servers import S, Servers
from worker.engine.shutdown import close_on
from worker.engine.spec import Preflight
from worker.machine.finding import Finding
from worker.settings import WorkerSettings


class RemoteSettings(WorkerSettings):
    """Settings that the openai and triton engines share."""

    remote_wait_s: Seconds | None = Field(
        None,
        gt=0,
        description="seconds for which a start waits for a server; unset: without limit",
    )

    @cached_property
    def model_name(self) -> str | None:
        """The name by which the servers know the model, even if it looks like a path."""
        return self.model


class RemoteEngine(Generic[S]):
    """Base of the openai and triton engines; `_servers` has the servers and their health."""

    grace_s = 0.0

    def __init__(self, settings: RemoteSettings) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._servers: Servers[S] = Servers(settings.stall_timeout_s, settings.remote_wait_s)

    def build(self) -> None:
        """Load what is needed on this machine. Blocks; called in the engine's own thread."""

    async def start(self) -> Capacity:
        """Wait until a server is healthy, and return the engine's capacity."""
        raise NotImplementedError

    def waits_for(self) -> str:
        """Return the servers that `start` or requests wait for, each with the reason."""
        return f"{WAITS_FOR}{self._servers.troubles}" if self._servers.troubles else ""

    def dead(self) -> bool:
        """Whether every server is down."""
        return self._servers.dead

    def last_progress(self) -> float:
        """Return the time of the latest step, or now if no request is in flight."""
        return self._servers.last_progress()

    def on_text(self, call: Callable[[], None]) -> None:
        """Set the function to call at each step, when a server may have sent text."""
        for server in self._servers.servers:
            server.stepped = call

    def kill(self) -> None:
        """Give up every server; their requests end with EngineDead."""
        self._servers.kill()

    def shutdown(self) -> None:
        """Close every connection. Called in the engine's own thread."""
        if self._loop is not None:
            close_on(self._loop, self._close())

    async def _close(self) -> None:
        await self._servers.close()


def preflight_of(engine: str, servers: str, model: str, limit: object) -> Preflight:
    """Return a preflight with the servers, the model and the limit that the settings name."""
    return Preflight(
        {
            "platform": f"{engine} servers, nothing runs here",
            "servers": servers,
            "model": model,
            "capacity": f"{limit} at once at each server",
        }
    )


def ask_once(
    make: Callable[[Any], RemoteEngine[Any]], settings: RemoteSettings, preflight: Preflight
) -> None:
    """Start an engine without waiting for servers, and add their answers to `preflight`."""
    engine = make(settings.model_copy(update={"remote_wait_s": 0.0}))

    async def start() -> Capacity:
        try:
            engine.build()
            return await engine.start()
        finally:
            await asyncio.to_thread(engine.shutdown)  # closes the connections on this loop

    try:
        capacity = asyncio.run(start())
    except EngineDead:
        remedy = "Start one, or correct its address; a worker that starts now waits for it"
        preflight.findings.append(
            Finding(f"no server is ready: {engine._servers.down_reasons}", remedy)
        )
        return
    preflight.rows["model"] = capacity.model
    if down := engine._servers.down_reasons:
        remedy = "Start it, or correct its address; until then the other servers get all requests"
        preflight.findings.append(Finding(f"a server is not ready: {down}", remedy, fatal=False))
