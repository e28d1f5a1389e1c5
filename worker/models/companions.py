"""Loads models together with another one (`with`): each of them has an engine and a drain.

The worker swaps them together: what waits for one of them counts for all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping

from worker.drain.counts import Counts
from worker.drain.drain import Drain
from worker.drain.events import Events
from worker.drain.lifecycle import State
from worker.models.announced import text_of
from worker.models.config import Model
from worker.models.policy import Demand
from worker.settings import WorkerSettings

log = logging.getLogger(__name__)


class Companions:
    """The companions: models that are loaded together with a main model; and their drains."""

    def __init__(
        self,
        models: Mapping[str, Model],
        together: Mapping[str, str],
        run: Callable[[WorkerSettings, Callable[[Drain], None]], Awaitable[None]],
    ) -> None:
        """`together` maps each companion to its main model."""
        self._models, self._run = models, run
        self._with = dict(together)
        self._drains: dict[str, Drain] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._leaving = False
        #: The totals of drains that have ended.
        self.totals: dict[str, Counts] = {}

    def main_models(self) -> list[str]:
        """Return the models between which the worker swaps."""
        return [name for name in self._models if name not in self._with]

    def merged(self, demands: Mapping[str, Demand]) -> dict[str, Demand]:
        """Return one demand for each main model and its companions."""
        return {
            main: merge([demands[name] for name in self.members(main) if name in demands])
            for main in self.main_models()
        }

    def members(self, main: str) -> list[str]:
        """Return the names of a main model and its companions."""
        return [main, *(name for name, its_main in self._with.items() if its_main == main)]

    def in_flight(self) -> int:
        """Return the number of requests that the loaded companions have in flight."""
        return sum(len(drain.in_flight) for drain in self._drains.values())

    def begin(self, main: str) -> None:
        """Load a main model's companions one after the other, in a task; once for each stay."""
        if not self._tasks:
            self._leaving = False
            self._tasks.append(asyncio.create_task(self._load(self.members(main)[1:])))

    async def _load(self, names: Iterable[str]) -> None:
        """Start the drains, each when the drain before is ready: engines measure free memory."""
        for name in names:
            if self._leaving:
                return
            task = asyncio.create_task(self._stay(self._models[name]))
            self._tasks.append(task)
            while not task.done() and not self._is_ready(name):
                await asyncio.wait([task], timeout=0.1)

    def _is_ready(self, name: str) -> bool:
        drain = self._drains.get(name)
        return drain is not None and drain.lifecycle.state is not State.STARTING

    async def _stay(self, model: Model) -> None:
        def begin(drain: Drain) -> None:
            self._drains[model.name] = drain
            if self._leaving:
                drain.begin_stop()

        main = self._with[model.name]
        log.info("model %s is loaded, together with %s", model.name, main,
                 extra={"action": "model_load", "model": model.name})  # fmt: skip
        try:
            await self._run(model.settings, begin)
        except Exception as error:
            if not self._leaving:
                self._with.pop(model.name, None)
                log.error(
                    "model %s is no longer loaded together with %s, but in stays of its own: %s",
                    model.name, main, text_of(error), exc_info=error,
                    extra={"action": "together_failed", "model": model.name},
                )  # fmt: skip
        finally:
            if (drain := self._drains.pop(model.name, None)) is not None:
                self.totals.setdefault(model.name, Counts(Events())).add(drain.counts)

    def leave(self, reason: str = "") -> None:
        """Let the drains end; `reason` is that of a swap, '' if the worker stops."""
        self._leaving = True
        for drain in self._drains.values():
            if reason:
                drain.swap(reason)
            else:
                drain.begin_stop()

    async def wait_for_end(self) -> None:
        """Wait until the drains have ended."""
        self.leave()
        while self._tasks:
            task = self._tasks.pop()
            await asyncio.wait([task])


def merge(demands: Iterable[Demand]) -> Demand:
    """Return what waits for several models that are loaded together."""
    found = list(demands)
    online = [each.online_s for each in found if each.online_s is not None]
    tokens = sum(each.tokens for each in found)
    return Demand(
        sum(each.requests for each in found),
        tokens,
        max((each.oldest_s for each in found), default=0.0),
        max(online, default=None),
        min((each.slack_s for each in found), default=float("inf")),
        sum(each.slots for each in found),
        sum(each.weighted for each in found) / tokens if tokens else 1.0,
        min((each.served for each in found if each.due), default=0.0),
        sum(each.due for each in found),
    )
