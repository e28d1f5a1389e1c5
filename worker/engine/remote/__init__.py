"""One fleet of servers for every engine whose model runs on other machines."""

from __future__ import annotations

from pydantic import Field

from contract.settings import Seconds
from worker.settings import WorkerSettings


class RemoteSettings(WorkerSettings):
    """What an engine in front of servers can be told."""

    remote_wait_s: Seconds | None = Field(
        None,
        gt=0,
        description="openai, triton: how long a start waits for a server; default no end",
    )
