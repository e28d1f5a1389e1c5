"""An engine that writes what a test tells it to, and a worker that tells it on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import orjson
import redis
from kit.drain.draining import Draining, soon

from contract import naming
from contract.errors import RequestFailed
from worker.drain.running_text import RunningText
from worker.engine import Completion, EngineRequest
from worker.engine.simulated.engine import SimulatedEngine


class Writer(SimulatedEngine):
    """Has written of every request what the test put into `texts`; ends when `go` is set."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.texts: list[str] = []
        #: What the result says where that is not the text so far.
        self.answers: list[str] | None = None
        self.asked: set[str] = set()
        self.go = asyncio.Event()
        self.fails = False

    async def generate(self, request: EngineRequest, request_id: str) -> Completion:
        if request.body.get("user") == "at once":
            return await super().generate(request, request_id)
        await self.go.wait()
        if self.fails:
            raise RequestFailed("as told")
        texts = self.texts if self.answers is None else self.answers
        choices = [{"index": n, "message": {"content": text}} for n, text in enumerate(texts)]
        return Completion(orjson.dumps({"choices": choices}), 1, 1)

    def text_so_far(self, request_id: str) -> Sequence[str]:
        self.asked.add(request_id)
        return list(self.texts)

    def writes(self, *texts: str) -> None:
        """Have written this of every request from now on, and say so as after a step."""
        self.texts = list(texts)
        self._wrote()


def telling(running: Draining) -> RunningText:
    """Return the part of a worker that tells texts."""
    return running.side_tasks.text


async def begun(running: Draining, count: int = 1) -> None:
    """Wait until so many requests are in the engine."""
    await soon(lambda: running.engines)
    await soon(lambda: len([r for r in running.drain.in_flight if r.since]) == count)


async def hears(running: Draining, client: redis.Redis) -> None:
    """Wait until the worker hears announcements."""
    await soon(lambda: client.pubsub_numsub(naming.LISTEN_CHANNEL)[0][1])
    await soon(lambda: running.engines)
