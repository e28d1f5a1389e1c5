"""Which models there are, by what workers announce, and in which queue each is asked for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from typing import Literal

from msgspec import Struct

from contract.errors import StoreUnavailable
from contract.naming import did_you_mean
from contract.redis.announcements import is_alive
from gateway.http.errors import ApiError, not_found
from gateway.redis.online import OnlineRequests
from gateway.served_models import ServedModels, visible_names

#: Announcements are asked for again after so long, beside the requests that need them.
FRESH_S = 1.0
#: Requests wait for newer ones than these.
STALE_S = 5.0
#: A model that is not known is looked for again, but not for each request.
AGAIN_S = 0.2


class Model(Struct, frozen=True):
    """One model that may be asked for; `created` is when this gateway first heard of it, in s."""

    id: str
    created: int
    object: Literal["model"] = "model"
    owned_by: str = "warmq"


class ModelList(Struct, frozen=True):
    """All models that a caller may ask for."""

    data: list[Model]
    object: Literal["list"] = "list"


class Models:
    """The models of one Redis, as workers announced them within the last second or so."""

    def __init__(self, redis: OnlineRequests, base: str, configured: str) -> None:
        """Prepare; `base` is the default queue, `configured` names models by commas."""
        self._redis = redis
        self._base, self._configured = base, configured
        self._served = ServedModels.of((), base, configured)
        self._created: dict[str, int] = {}
        self._read_at = float("-inf")
        self._reading: asyncio.Task[None] | None = None
        #: What Redis' clock is ahead of ours, in seconds.
        self.clock_ahead = 0.0

    async def asked(self, name: str | None, allowed: Collection[str] | None) -> tuple[str, str]:
        """Return the queue in which a model is asked for, and the name to ask there by.

        `allowed` are the caller's models, None for all; then who names none asks by ''.

        Raises:
            ApiError: 404 if there is no such model for this caller, 503 if no worker lives.
            StoreUnavailable: Redis cannot be asked.
        """
        await self._look(STALE_S)
        name = name or self._served.default_of(allowed)
        asked = (name, allowed)
        queue = self._served.queue_of(*asked)
        may_come = queue is None and name and (allowed is None or name in allowed)
        if may_come and await self._look(AGAIN_S, wait=True):
            queue = self._served.queue_of(*asked)
        if queue is None:
            raise self._refusal(*asked)
        return queue, name

    async def every(self, allowed: Collection[str] | None) -> list[Model]:
        """Return the models that a caller may ask for, by name."""
        await self._look(FRESH_S, wait=True)
        names = {*visible_names(self._served.names), *visible_names(self._served.configured)}
        return [self._model(n) for n in sorted(names) if allowed is None or n in allowed]

    async def one(self, name: str, allowed: Collection[str] | None) -> Model:
        """Return one model.

        Raises:
            ApiError: 404.
        """
        await self._look(FRESH_S, wait=True)
        if name and self._served.queue_of(name, allowed):
            return self._model(name)
        raise not_found("model", name)

    def _refusal(self, name: str, allowed: Collection[str] | None) -> ApiError:
        """Return why a model has no queue, for a caller of these models."""
        if name and allowed is not None and name not in allowed:
            return self._unknown(name, allowed)
        if not name and allowed is not None and self._knows_all(allowed):
            return self._nameless(allowed)  # no worker that comes can tell which is meant
        if self._served.is_outdated(name, allowed):
            return _nobody(older=True)
        if not self._served.alive:
            return _nobody(older=bool(self._served.outdated))
        if name:
            return self._unknown(name, allowed)
        return self._nameless(allowed)

    def _knows_all(self, names: Collection[str]) -> bool:
        return all(n in self._served.names or n in self._served.configured for n in names)

    def _nameless(self, allowed: Collection[str] | None) -> ApiError:
        which = self._served.listing(allowed)
        if allowed is not None:
            which = f"this key may use {', '.join(sorted(allowed)) or 'none'}"
        return ApiError(
            400,
            f"you must name a model; {which}",
            code="missing_required_parameter",
            param="model",
        )

    def _unknown(self, name: str, allowed: Collection[str] | None) -> ApiError:
        known = [n for n in visible_names(self._served.names) if allowed is None or n in allowed]
        message = f"there is no model {name[:200]!r} here{did_you_mean(name, known)}"
        return ApiError(
            404,
            f"{message}; {self._served.listing(allowed)}",
            code="model_not_found",
            param="model",
            type="invalid_request_error",
            retry=False,
        )

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
        # One that is silent may be starting again, but whoever waits for an answer is better told.
        self._served = ServedModels.of(filter(is_alive, workers), self._base, self._configured)
        self._read_at = time.monotonic()
        self.clock_ahead = now_s - time.time()
        for name in self._served.names:
            self._created.setdefault(name, int(now_s))


def _nobody(*, older: bool) -> ApiError:
    told = "no worker is running; try again when one has started"
    if older:
        told = (
            "all workers that could answer are older than this gateway, and would not take what "
            "it queues; upgrade the workers"
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
