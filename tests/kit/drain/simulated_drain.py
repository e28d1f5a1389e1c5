"""Lines go through the openai engine to a simulated server, as the drain does it: what is handed
back is run again by the next engine."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from kit.servers.simulated_server import SimulatedServer

from contract.errors import EngineDead, RequestFailed, RequestRejected
from contract.openai.body import CHAT_URL
from worker.engine import EngineRequest
from worker.engine.openai import OpenAISettings
from worker.engine.openai.engine import OpenAIEngine

#: Requests that a drain holds for an engine of 256 slots.
AT_ONCE = 320


@dataclass
class Outcome:
    """How lines ended: `completed` by their numbers, `failed` with their errors; `deaths` are
    requests that were handed back and blamed, `engines` those that were started."""

    completed: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    deaths: int = 0
    engines: int = 0


def line(n: int, **fields: Any) -> tuple[str, EngineRequest]:
    """Return one line's id and its chat."""
    chat = {"messages": [{"role": "user", "content": str(n)}], "max_tokens": 16, **fields}
    return f"r{n}", EngineRequest(CHAT_URL, chat)


class SimulatedDrain:
    """Keeps AT_ONCE requests in the engine; `engine` is the one that runs now."""

    def __init__(self, server: SimulatedServer, patch: pytest.MonkeyPatch, **settings: Any) -> None:
        patch.setattr(aiohttp, "ClientSession", server.session)
        patch.setattr(aiohttp, "TCPConnector", lambda **_: None)
        urls = {"openai_base_urls": "http://server:8000/v1"}
        self._settings = OpenAISettings(engine="openai", **{"model": None} | urls | settings)
        self.outcome = Outcome()
        self.engine: OpenAIEngine
        self._begun = asyncio.Event()

    async def run(self, lines: Iterable[tuple[str, EngineRequest]]) -> Outcome:
        """Run all lines to their ends."""
        waiting = deque(lines)
        while waiting:
            self.engine = OpenAIEngine(self._settings)
            self.outcome.engines += 1
            await self.engine.start()
            self._begun.set()
            back: list[tuple[str, EngineRequest]] = []
            await asyncio.gather(*(self._one_after_another(waiting, back) for _ in range(AT_ONCE)))
            await self.engine._close()
            waiting.extendleft(reversed(back))
        return self.outcome

    async def begun(self) -> OpenAIEngine:
        """Wait for the first engine."""
        await self._begun.wait()
        return self.engine

    async def _one_after_another(
        self, waiting: deque[tuple[str, EngineRequest]], back: list[tuple[str, EngineRequest]]
    ) -> None:
        while waiting and not self.engine.dead():
            name, request = waiting.popleft()
            try:
                await self.engine.generate(request, name)
                self.outcome.completed.add(name)
            except (RequestRejected, RequestFailed) as error:
                self.outcome.failed[name] = f"{error.code}: {error}"
            except EngineDead as error:
                self.outcome.deaths += error.inside
                back.append((name, request))
