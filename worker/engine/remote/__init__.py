"""One fleet of servers for every engine whose model runs on other machines."""

import asyncio
from typing import Generic

from pydantic import Field

from contract.settings import Seconds
from worker.engine.end import close_on
from worker.engine.remote.fleet import Fleet, S
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

    def dead(self) -> bool:
        """Whether every server is away."""
        return self._fleet.dead

    def last_progress(self) -> float:
        """Return when a server last made a step; now, if no request is in any."""
        return self._fleet.last_progress()

    def kill(self) -> None:
        """Give up every server; what is in them ends with EngineDead."""
        self._fleet.kill()

    def shutdown(self) -> None:
        """Close every connection; called in the engine's thread."""
        if self._loop is not None:
            close_on(self._loop, self._close())

    async def _close(self) -> None:
        await self._fleet.close()
