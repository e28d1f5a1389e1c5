"""Which models there are, by what workers announce, and in which queue each is asked for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import PurePath
from typing import Any

from contract.errors import StoreUnavailable
from contract.naming import queue_name
from contract.nearest import did_you_mean
from contract.redis.gateway.live import LiveRequests
from contract.redis.reads import is_alive, protocol_of
from contract.version import PROTOCOL
from producer.gateway.errors import ApiError, not_found
from producer.gateway.live.protocol import Model

#: Announcements are asked for again after so long, beside the requests that need them.
FRESH_S = 1.0
#: Requests wait for newer ones than these.
STALE_S = 5.0
#: A model that is not known is looked for again, but not for each request.
AGAIN_S = 0.2
#: The id of what a worker of the default queue serves that does not name its model.
UNNAMED = "default"


class Models:
    """The models of one Redis, as workers announced them within the last second or so."""

    def __init__(self, redis: LiveRequests, base: str, configured: str) -> None:
        """Prepare; `base` is the default queue, `configured` names models by commas."""
        self._redis = redis
        self._base = base
        self._configured = [name for name in map(str.strip, configured.split(",")) if name]
        self._queues: dict[str, str] = {}
        self._alive: set[str] = set()
        #: Whether there are workers of an older protocol, which do not see what we queue.
        self._older = False
        self._created: dict[str, int] = {}
        self._read_at = float("-inf")
        self._reading: asyncio.Task[None] | None = None
        #: What Redis' clock is ahead of ours, in seconds.
        self.clock_ahead = 0.0

    async def queue_of(self, name: str | None, allowed: Collection[str] | None) -> str:
        """Return the queue in which a model is asked for; `allowed` are the caller's models.

        Raises:
            ApiError: 404 if there is no such model for this caller, 503 if no worker lives.
            StoreUnavailable: Redis cannot be asked.
        """
        await self._look(STALE_S)
        if name is None or name == "":
            return self._only_queue(allowed)
        if allowed is None or name in allowed:
            if (queue := self._queue_of(name)) or await self._look(AGAIN_S, wait=True):
                queue = queue or self._queue_of(name)
            if queue:
                return queue
            if not self._alive:
                raise _nobody(older=self._older)
        raise self._unknown(name, allowed)

    async def every(self, allowed: Collection[str] | None) -> list[Model]:
        """Return the models that a caller may ask for, by name."""
        await self._look(FRESH_S, wait=True)
        names = dict.fromkeys([*self._shown(), *self._configured])
        return [self._model(n) for n in sorted(names) if allowed is None or n in allowed]

    async def one(self, name: str, allowed: Collection[str] | None) -> Model:
        """Return one model.

        Raises:
            ApiError: 404.
        """
        await self._look(FRESH_S, wait=True)
        if (allowed is None or name in allowed) and self._queue_of(name):
            return self._model(name)
        raise not_found("model", name)

    def _queue_of(self, name: str) -> str | None:
        if queue := self._queues.get(name):
            return queue
        if name in self._configured:
            return queue_name(name, self._base)
        # A worker that does not name its model runs what is asked for under any name.
        return self._base if UNNAMED in self._queues else None

    def _only_queue(self, allowed: Collection[str] | None) -> str:
        queues = {q for n, q in self._queues.items() if allowed is None or n in allowed}
        if self._base in queues:
            return self._base
        if len(queues) == 1:
            return queues.pop()
        if not self._alive:
            raise _nobody(older=self._older)
        raise ApiError(
            400,
            f"you must name a model; {self._told(allowed)}",
            code="missing_required_parameter",
            param="model",
        )

    def _unknown(self, name: str, allowed: Collection[str] | None) -> ApiError:
        known = [n for n in self._shown() if allowed is None or n in allowed]
        message = f"there is no model {name[:200]!r} here{did_you_mean(name, known)}"
        return ApiError(
            404,
            f"{message}; {self._told(allowed)}",
            code="model_not_found",
            param="model",
            type="invalid_request_error",
            retry=False,
        )

    def _told(self, allowed: Collection[str] | None) -> str:
        names = [n for n in self._shown() if allowed is None or n in allowed][:20]
        return f"served are: {', '.join(names)}" if names else "none is served to you now"

    def _shown(self) -> list[str]:
        """Return the names to show: of a folder its last part, never where it is."""
        return [name for name in self._queues if not PurePath(name).is_absolute()]

    def _model(self, name: str) -> Model:
        return Model(name, self._created.setdefault(name, int(time.time())))

    async def _look(self, older_than_s: float, *, wait: bool = False) -> bool:
        """Ask for announcements if those known are older; return whether newer ones were read.

        A request waits for them only if those known are older than that; else they come beside it.
        """
        age = time.monotonic() - self._read_at
        if age < min(FRESH_S, older_than_s):
            return False
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read())
            self._reading.add_done_callback(_retrieved)
        if wait or age >= older_than_s:
            await asyncio.shield(self._reading)
            return True
        return False

    async def _read(self) -> None:
        workers, now_s = await self._redis.workers()
        living = [worker for worker in workers if is_alive(worker)]
        alive = [worker for worker in living if protocol_of(worker) >= PROTOCOL]
        self._older = len(alive) < len(living)
        self._queues = dict(self._names(alive))
        self._alive = {worker["queue"] for worker in alive}
        self._read_at = time.monotonic()
        self.clock_ahead = now_s - time.time()
        for name in self._queues:
            self._created.setdefault(name, int(now_s))

    def _names(self, workers: Iterable[Mapping[str, Any]]) -> Iterable[tuple[str, str]]:
        """Yield the names that each worker answers to, with its queue."""
        prefix = f"{self._base}."
        for worker in workers:
            queue, model = worker["queue"], worker.get("model")
            if queue.startswith(prefix):
                yield queue.removeprefix(prefix), queue
            elif queue != self._base:
                continue  # another installation's
            elif isinstance(model, str) and model:
                yield model, queue
                if PurePath(model).is_absolute():
                    yield PurePath(model).name, queue
            else:
                yield UNNAMED, queue
            adapters = worker.get("adapters")
            for adapter in adapters if isinstance(adapters, list) else ():
                yield str(adapter), queue


def _nobody(*, older: bool) -> ApiError:
    told = "no worker is running; try again when one has started"
    if older:
        told = (
            "all workers that run are of a version older than this gateway's, and do not see "
            "what it queues; upgrade the workers"
        )
    return ApiError(
        503,
        told,
        code="no_worker",
        retry=True,
        after_s=5,
    )


def _retrieved(task: asyncio.Task[None]) -> None:
    # Whoever waits for it is told; if nobody does, the next request asks again.
    if not task.cancelled() and not isinstance(task.exception(), StoreUnavailable):
        task.result()
