"""An engine that hangs where a test wants it to, and a drain on a Redis that may hang, too."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import redis
from kit.drain.draining import LONG, Draining, draining, send, soon
from kit.protocol.lessee import QUEUE, celery_message, chat, queued_ids, stored
from kit.protocol.snapshot import request_of

from contract.errors import StoreUnavailable
from contract.redis import keys
from contract.redis.reads import Reads
from demo.stack import RedisServer
from worker.drain.lifecycle import State
from worker.engine import Capacity, Completion, EngineRequest
from worker.engine.simulated.engine import SimulatedEngine

#: A request that does not end when its engine dies.
NEVER = "never"


class TroubledEngine(SimulatedEngine):
    """Hangs in the steps of its life that `hangs` names, until the test ends.

    The steps: `build`, which ends when the engine is killed, `deaf build`, which does not, `start`,
    `shutdown`, and `deaf generate`, which takes no notice of a cancellation. A `failing shutdown`
    raises.
    """

    def __init__(self, hangs: set[str], slots: int) -> None:
        super().__init__(slots, 0.0)
        self._hangs = hangs
        self._killed = threading.Event()
        self._over = threading.Event()
        #: The steps it has come to.
        self.came_to: set[str] = set()

    def build(self) -> None:
        self.came_to.add("build")
        if "build" in self._hangs:
            self._killed.wait()
        if "deaf build" in self._hangs:
            self._over.wait()

    async def start(self) -> Capacity:
        self.came_to.add("start")
        if "start" in self._hangs:
            await asyncio.sleep(600)
        return await super().start()

    async def generate(self, request: EngineRequest, request_id: str) -> Completion:
        if request.body.get("user") == NEVER:
            await asyncio.Event().wait()
        if "deaf generate" not in self._hangs:
            return await super().generate(request, request_id)
        self.running += 1
        work = asyncio.ensure_future(super().generate(request, request_id))
        while not self._over.is_set():
            try:
                await asyncio.sleep(0.02)
            except asyncio.CancelledError:
                continue
        work.cancel()
        return await work

    def kill(self) -> None:
        self._killed.set()
        super().kill()

    def shutdown(self) -> None:
        self.came_to.add("shutdown")
        if "shutdown" in self._hangs:
            self._over.wait()
        if "failing shutdown" in self._hangs:
            raise TimeoutError("the connection was not closed")

    def release(self) -> None:
        """End every hang."""
        self._killed.set()
        self._over.set()


@dataclass
class Scene:
    """A drain of four slots, its engines, and its Redis."""

    running: Draining
    server: RedisServer
    client: redis.Redis
    #: What the engines hang in from now on.
    hangs: set[str]
    ids: list[str] = field(default_factory=list)

    @property
    def engine(self) -> TroubledEngine:
        """The engine that was built last."""
        engine = self.running.engine
        assert isinstance(engine, TroubledEngine)
        return engine

    def send(self, *fates: str) -> None:
        """Queue requests."""
        self.ids += send(self.client, *[chat(f"{n}", user=fate) for n, fate in enumerate(fates)])

    def send_suspect(self) -> None:
        """Queue a suspect that takes long."""
        self.client.lpush(keys.suspects_list(QUEUE), celery_message("suspect", chat(user=LONG)))
        self.ids.append("suspect")

    async def ready(self) -> None:
        """Wait until the engine is ready."""
        await soon(lambda: self.running.state is State.READY)

    async def full(self, *fates: str) -> None:
        """Queue requests, by default ten long ones, and wait until four run."""
        await self.ready()
        self.send(*(fates or [LONG] * 10))
        await soon(lambda: self.engine.running >= 4)

    async def came_to(self, step: str, engines: int = 1) -> None:
        """Wait until the newest engine, the nth, has come to a step of its life."""
        running = self.running
        await soon(lambda: len(running.engines) == engines and step in self.engine.came_to)

    def hang_redis(self) -> None:
        """From now on Redis accepts, and does not answer."""
        assert self.server.process is not None
        self.server.process.send_signal(signal.SIGSTOP)

    def bring_redis_back(self) -> None:
        """Wake it up, or start it again."""
        if self.server.process is None:
            self.server.start()
        else:
            self.server.process.send_signal(signal.SIGCONT)

    def release(self) -> None:
        """End every hang."""
        self.bring_redis_back()
        for engine in self.running.engines:
            assert isinstance(engine, TroubledEngine)
            engine.release()

    def queued(self) -> list[str]:
        """Return the ids of what waits in the queue or among the suspects."""
        lists = Reads(self.client).queue_lengths(QUEUE)
        return [rid for key in lists for rid in queued_ids(self.client, key)]

    def held(self) -> list[str]:
        """Return the ids of what is leased."""
        records = [r for key in self.client.keys("warmq:worker:*") for r in self.client.hvals(key)]
        return [request_of(record) for record in records]

    def answered(self) -> list[str]:
        """Return the ids of what has a result."""
        return [rid for rid in self.ids if stored(self.client, rid)]


@asynccontextmanager
async def scene(server: RedisServer, *hangs: str, **options: Any) -> AsyncIterator[Scene]:
    """Run a drain with such an engine for the block; at the end nothing hangs any more.

    That it could not hand over without Redis is no error here.
    """
    hanging = set(hangs)

    def make(slots: int, _latency_s: float) -> TroubledEngine:
        return TroubledEngine(hanging, slots)

    with server.client() as client:
        try:
            async with draining(server.url, make, look_ahead=4, lease_s=60, **options) as running:
                on = Scene(running, server, client, hanging)
                try:
                    yield on
                finally:
                    on.release()
        except BaseExceptionGroup as group:
            _, others = group.split(StoreUnavailable)
            if others is not None:
                raise
