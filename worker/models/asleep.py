"""Keeps the engine of one model asleep between its stays, and checks every sleep and wake."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from contract.errors import EngineDead
from worker.drain.keeper import EngineKeeper
from worker.drain.lifecycle import CANCEL_S, end_tasks
from worker.engine import CanSleep, Capacity, Engine
from worker.models.announced import text_of

log = logging.getLogger(__name__)

#: Seconds that a sleep may take: the first one of an engine pins host memory, which takes 0.75 s
#: for each GiB of weights (an H100 with vLLM 0.26).
SLEEP_S = 180.0
#: Seconds that a wake and the answer to the fixed question may take.
WAKE_S = 60.0
#: Expected seconds of a model's first swap by a wake: 1.2 s for 8B on an H200 (vLLM 0.26), more for
#: larger models.
ASSUMED_WAKE_S = 5.0
#: Deaths in a row, asleep or while waking, after which the engine is not kept any more.
MOST_DEATHS = 2
#: Seconds between two checks whether the engine sleeps, or the swap has become a stop.
_CHECK_S = 0.1


class Asleep(EngineKeeper):
    """The keeper of one model's engine, which sleeps between two stays.

    After each sleep the device's memory is read; after each wake the engine is asked one fixed
    question. If too much memory stays in use, or the answer differs from the one after the engine's
    start, the engine is shut down, and from then on each stay starts a new engine.
    """

    def __init__(self, model: str, asleep_bytes: int) -> None:
        """`asleep_bytes` is the most device memory that the engine may have asleep."""
        super().__init__()
        #: Whether the engine is kept; False after a check has failed.
        self.works = True
        self._model, self._asleep_bytes = model, asleep_bytes
        self._kept: tuple[Engine, Capacity] | None = None
        #: The bytes of the device in use before this engine was built or woken.
        self._before: int | None = None
        self._answer = ""
        self._deaths = 0
        #: Whether the engine was woken, and not built, for the present stay.
        self._woken = False

    def take(self) -> tuple[Engine, Capacity] | None:
        """Return the sleeping engine, if any; the caller then has to wake it or shut it down."""
        kept, self._kept = self._kept, None
        return kept

    def before_build(self, engine: Engine) -> None:
        """Read the memory of the device before the engine has any of it."""
        self._woken = False
        if isinstance(engine, CanSleep):
            self._before = engine.device_used()

    async def after_start(self, engine: Engine) -> None:
        """Ask the fixed question for the first time."""
        if not self.works or not isinstance(engine, CanSleep):
            return
        try:
            async with asyncio.timeout(WAKE_S):
                self._answer = await engine.answer_fixed_question()
        except EngineDead:
            raise
        except Exception as error:  # the model is served, but its engine is not kept
            self._stop_keeping(f"it has no answer to the fixed question: {text_of(error)}")

    async def wake(self, engine: Engine) -> bool:
        """Wake the engine, and ask it the fixed question."""
        if not isinstance(engine, CanSleep):
            return False
        if engine.dead():
            return self._died("it died asleep")
        # The bytes in use now: those that this engine keeps asleep, and those of other programs.
        before = engine.device_used()
        waking = asyncio.create_task(_answer_awake(engine))
        try:
            await asyncio.wait([waking], timeout=WAKE_S)
            if not waking.done():
                return self._hangs(f"it was not awake after {WAKE_S:g} s")
            answer = waking.result()
        except EngineDead as error:
            return self._died(text_of(error))
        except Exception as error:  # the libraries raise many error types
            return (
                self._died(text_of(error)) if engine.dead() else self._stop_keeping(text_of(error))
            )
        finally:
            await end_tasks([waking], CANCEL_S)
        if answer != self._answer:
            return self._stop_keeping("its answer to the fixed question is another one than before")
        self._before = before
        self._deaths = 0
        self._woken = True
        return True

    def next_load_s(self, load_s: float) -> float:
        """Return `load_s` after a wake; a start, much slower, does not show a wake's time."""
        return min(load_s, ASSUMED_WAKE_S) if self.works and not self._woken else load_s

    async def keep(self, engine: Engine, capacity: Capacity, wanted: Callable[[], bool]) -> bool:
        """Let the engine sleep, and read how much memory it has freed."""
        if not self.works or not isinstance(engine, CanSleep):
            return False
        began, awake = time.monotonic(), engine.device_used()
        sleeping = asyncio.create_task(engine.sleep())
        while not sleeping.done() and wanted() and time.monotonic() < began + SLEEP_S:
            await asyncio.wait([sleeping], timeout=_CHECK_S)
        if not sleeping.done():
            await end_tasks([sleeping], CANCEL_S)
            if wanted():
                self._hangs(f"it was not asleep after {SLEEP_S:g} s")
            return False
        if error := sleeping.exception():
            text = text_of(error)
            return self._died(text) if engine.dead() else self._stop_keeping(text)
        asleep = engine.device_used()
        if not self._is_free(asleep):
            return False
        if awake is not None and asleep is not None:
            log.info(
                "model %s sleeps: %.1f GiB of the device are free again, %.1f s",
                self._model, (awake - asleep) / 2**30, time.monotonic() - began,
                extra={"action": "model_asleep", "model": self._model},
            )  # fmt: skip
        self._kept = engine, capacity
        return True

    def _is_free(self, asleep: int | None) -> bool:
        """Return whether the engine has freed the device's memory; True if this cannot be read."""
        if asleep is None or self._before is None:
            return True
        more = asleep - self._before
        if more <= self._asleep_bytes:
            return True
        return self._stop_keeping(
            f"asleep it has {more / 2**30:.1f} GiB of the device, at most "
            f"{self._asleep_bytes / 2**30:.1f} were planned"
        )

    def _died(self, why: str) -> bool:
        self._deaths += 1
        if self._deaths >= MOST_DEATHS:
            return self._stop_keeping(f"it died {self._deaths} times in a row: {why}")
        log.warning("the sleeping engine of model %s is replaced: %s", self._model, why,
                    extra={"action": "sleep_died", "model": self._model})  # fmt: skip
        return False

    def _hangs(self, why: str) -> bool:
        self.hangs = True
        return self._stop_keeping(why)

    def _stop_keeping(self, why: str) -> bool:
        self.works, self.failure = False, why
        log.error(
            "model %s cannot sleep: %s; from now on each stay of it starts a new engine",
            self._model, why, extra={"action": "sleep_failed", "model": self._model},
        )  # fmt: skip
        return False


async def _answer_awake(engine: CanSleep) -> str:
    await engine.wake_up()
    return await engine.answer_fixed_question()
