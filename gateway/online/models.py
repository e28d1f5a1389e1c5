"""Finds the models that workers announce, and the queue of each model.

Each worker writes its announcement, which has its queue, model and state, into Redis once a second.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Collection
from typing import Literal

from msgspec import Struct

from contract.errors import StoreUnavailable
from contract.naming import did_you_mean
from gateway.http.errors import ApiError, not_found
from gateway.redis.online import OnlineRequests
from gateway.served_models import ServedModels

#: Seconds after which announcements are read again, while requests use the old ones.
FRESH_S = 1.0
#: Seconds after which requests wait until announcements are read again.
STALE_S = 5.0
#: Seconds after which an unknown model is looked up again.
AGAIN_S = 0.2
#: Seconds after which a client may ask again for a model that is not loaded.
NOT_LOADED_S = 30.0
#: Most seconds until a worker tries again to load a model (worker/models/announced.py).
LONGEST_RETRY_S = 600.0
#: Most characters of the reason why a model cannot be loaded.
WHY_CHARACTERS = 300


class Model(Struct, frozen=True):
    """One model; `created`: when this gateway first saw it, in seconds since 1970."""

    id: str
    created: int
    object: Literal["model"] = "model"
    owned_by: str = "warmq"


class ModelList(Struct, frozen=True):
    """All models that a caller may use."""

    data: list[Model]
    object: Literal["list"] = "list"


class Models:
    """Caches for about a second the models that workers announce in one Redis."""

    def __init__(
        self, redis: OnlineRequests, base: str, configured: str, refuses: bool = False
    ) -> None:
        """Take the default queue (`base`), and the setting WARMQ_GATEWAY_MODELS (`configured`).

        If `refuses`, requests for a model that no worker has loaded are refused.
        """
        self._redis, self._refuses = redis, refuses
        self._base, self._configured = base, configured
        self._served = ServedModels.of((), base, configured)
        self._created: dict[str, int] = {}
        self._read_at = float("-inf")
        self._reading: asyncio.Task[None] | None = None
        #: Seconds by which Redis's clock is ahead of this machine's.
        self.clock_ahead = 0.0

    async def queue_and_name(
        self, name: str | None, allowed: Collection[str] | None, *, may_wait: bool = False
    ) -> tuple[str, str]:
        """Return a model's queue, and its name for the request's body ('' for none).

        `allowed` has the caller's models, None for all. `may_wait`: the request may wait until a
        worker has loaded the model, even if this gateway refuses online requests for it.

        Raises ApiError (404 if the caller has no such model, 503 if no worker is alive, can load or
        has loaded it), or StoreUnavailable.
        """
        await self._refresh(STALE_S)
        name = name or self._served.default_of(allowed)
        queue = self._served.queue_of(name, allowed)
        may_come = queue is None and name and (allowed is None or name in allowed)
        if may_come and await self._refresh(AGAIN_S, wait=True):
            queue = self._served.queue_of(name, allowed)
        if queue is None:
            raise self._refusal(name, allowed)
        refuses = self._refuses and not may_wait
        if self._cannot_run(queue, name, allowed, refuses):
            await self._refresh(AGAIN_S, wait=True)  # a worker may have loaded it meanwhile
            if error := self._cannot_run(queue, name, allowed, refuses):
                raise error
        return queue, name

    async def all_allowed(self, allowed: Collection[str] | None) -> list[Model]:
        """Return the models that a caller may use, by name."""
        await self._refresh(FRESH_S, wait=True)
        names = self._served.visible({*self._served.names, *self._served.configured})
        return [self._model(n) for n in sorted(names) if allowed is None or n in allowed]

    async def get(self, name: str, allowed: Collection[str] | None) -> Model:
        """Return one model; raise ApiError (404)."""
        await self._refresh(FRESH_S, wait=True)
        if name and self._served.queue_of(name, allowed):
            return self._model(name)
        raise not_found("model", name)

    def _model(self, name: str) -> Model:
        return Model(name, self._created.setdefault(name, int(time.time())))

    def _refusal(self, name: str, allowed: Collection[str] | None) -> ApiError:
        """Return the error for a model without a queue; the caller may use `allowed`."""
        served = self._served
        forbidden = bool(name) and allowed is not None and name not in allowed
        known = {*served.names, *served.configured}
        # All models of the key are known, so a worker that starts cannot decide which one is meant.
        ambiguous = not name and allowed is not None and known.issuperset(allowed)
        if not forbidden and not ambiguous:
            if served.is_outdated(name, allowed) or (not served.alive and served.outdated):
                return _no_worker(
                    "all workers that could run this request are older than this gateway and "
                    "would not take it; upgrade the workers"
                )
            if not served.alive:
                return _no_worker("no worker is running; try again when one has started")
        which = served.listing(allowed)
        if name:
            names = [n for n in served.visible(served.names) if allowed is None or n in allowed]
            return ApiError(
                404,
                f"there is no model {name[:200]!r} here{did_you_mean(name, names)}; {which}",
                code="model_not_found", param="model", type="invalid_request_error", retry=False,
            )  # fmt: skip
        if allowed is not None:
            which = f"this key may use {', '.join(sorted(allowed)) or 'none'}"
        return ApiError(
            400, f"you must name a model; {which}", code="missing_required_parameter",
            param="model",
        )  # fmt: skip

    def _cannot_run(
        self, queue: str, name: str, allowed: Collection[str] | None, refuses: bool
    ) -> ApiError | None:
        """Return the error for a model that is not loaded, None if a request for it may wait.

        A worker tries a model again only if a request waits for it. So requests are queued from the
        time of the next try, which the worker announces; a time too far ahead is of a wrong clock.
        """
        if failure := self._served.unloadable.get(queue):
            left_s = failure.again_at_s - time.time()
            if 0 < left_s <= LONGEST_RETRY_S:
                return ApiError(
                    503,
                    f"no worker can load model {name[:200]!r}: {failure.why[:WHY_CHARACTERS]}",
                    code="model_unloadable", param="model", retry=False, after_s=math.ceil(left_s),
                )  # fmt: skip
        if refuses and queue in self._served.not_loaded:
            return self._not_loaded(name, allowed)
        return None

    def _not_loaded(self, name: str, allowed: Collection[str] | None) -> ApiError:
        served = self._served
        names = (n for n, queue in served.names.items() if queue not in served.not_loaded)
        loaded = sorted(n for n in served.visible(names) if allowed is None or n in allowed)
        return ApiError(
            503,
            f"model {name[:200]!r} is not loaded now, and this gateway queues nothing for it; "
            f"loaded models: {', '.join(loaded[:20]) or 'none'}",
            code="model_not_loaded", param="model", retry=False, after_s=NOT_LOADED_S,
        )  # fmt: skip

    async def _refresh(self, older_than_s: float, *, wait: bool = False) -> bool:
        """Read old announcements again; return whether this call waited for the new ones.

        Announcements younger than FRESH_S and younger than `older_than_s` are not read again.
        Otherwise the call starts to read them, and waits for the new ones if `wait` is set or the
        old ones are older than `older_than_s`.
        """
        age = time.monotonic() - self._read_at
        if age < min(FRESH_S, older_than_s):
            return False
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read())
            self._reading.add_done_callback(_retrieve)
        if wait or age >= older_than_s:
            await asyncio.shield(self._reading)
            return True
        return False

    async def _read(self) -> None:
        workers, now_s = await self._redis.workers()
        # Silent workers, whose announcements are old, do not count: they may be restarting, but an
        # online caller should not wait for them.
        self._served = ServedModels.of(workers, self._base, self._configured, silent=False)
        self._read_at = time.monotonic()
        self.clock_ahead = now_s - time.time()
        for name in self._served.names:
            self._created.setdefault(name, int(now_s))


def _no_worker(message: str) -> ApiError:
    return ApiError(503, message, code="no_worker", retry=True, after_s=5)


def _retrieve(task: asyncio.Task[None]) -> None:
    # A request that awaits the task gets its error. If none does, the next request reads again.
    if not task.cancelled() and not isinstance(task.exception(), StoreUnavailable):
        task.result()
