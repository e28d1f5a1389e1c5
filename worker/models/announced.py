"""Keeps what a worker of several models announces of them: swaps, and models that cannot be loaded.

It also decides how long the worker waits before it tries again to load a model that failed to load.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from contract.errors import StoreUnavailable

#: Seconds after which a model that could not be loaded is tried again; doubled each time up to
#: LONGEST_RETRY_S.
RETRY_S, LONGEST_RETRY_S = 30.0, 600.0
#: Most swaps that are announced.
MOST_SWAPS = 5
#: Most characters of a swap's announced reason.
WHY_CHARACTERS = 200


class AnnouncedModels:
    """The additional fields of the announcement of a worker with several models."""

    def __init__(self, queues: Mapping[str, str]) -> None:
        self._swaps: list[dict[str, Any]] = []
        self._unloadable: dict[str, dict[str, Any]] = {}
        #: The time.monotonic() of the next try, for each model that cannot be loaded.
        self._retry_at: dict[str, float] = {}
        self._sleep_failed: dict[str, str] = {}
        self._loads: dict[str, dict[str, float]] = {}
        self._adapters: dict[str, list[str]] = {}
        self._loaded = ""
        self._swap: dict[str, Any] = {}
        #: The fields; the drain reads them each second.
        self.fields: dict[str, Any] = {
            "models": dict(queues),
            "swaps": self._swaps,
            "loads": self._loads,
            "unloadable": self._unloadable,
            "sleep_failed": self._sleep_failed,
            "model_adapters": self._adapters,
        }

    def note_sleep(self, failures: Mapping[str, str]) -> None:
        """Note by model why its engine no longer sleeps between stays; '' if it still does."""
        failed = {model: why[:WHY_CHARACTERS] for model, why in failures.items() if why}
        self._sleep_failed.update(failed)

    def note_adapters(self, names: Mapping[str, list[str]]) -> None:
        """Note the names of the adapters of each model, loaded or not."""
        self._adapters.clear()
        self._adapters.update(names)

    def begin(self, model: str, why: str) -> None:
        """Note that the worker begins to load a model, and why."""
        source = {"from": self._loaded} if self._loaded else {}
        at = int(time.time() * 1000)
        self._swap = {**source, "to": model, "why": why[:WHY_CHARACTERS], "at": at}
        self._loaded = ""

    def note_loaded(self, model: str, seconds: float) -> None:
        """Note that a model was loaded `seconds` after the decision to load it."""
        self._loaded = model
        self._unloadable.pop(model, None)
        self._retry_at.pop(model, None)
        counts = self._counts(model)
        counts["loaded"] += 1
        counts["seconds"] = round(counts["seconds"] + seconds, 3)
        self._end(seconds)

    def note_failed(self, model: str, why: str, seconds: float) -> float:
        """Note why a model cannot be loaded; return the seconds until it is tried again."""
        tries = int(self._unloadable.get(model, {}).get("tries", 0)) + 1
        pause_s: float = min(LONGEST_RETRY_S, RETRY_S * 2 ** min(tries - 1, 10))
        self._retry_at[model] = time.monotonic() + pause_s
        again_at = int((time.time() + pause_s) * 1000)
        self._counts(model)["failed"] += 1
        self._unloadable[model] = {"why": why, "tries": tries, "again_at": again_at}
        self._loaded = ""
        self._end(seconds, failed=True)
        return pause_s

    def may_load(self, model: str) -> bool:
        """Return whether a model may be loaded now: its last load worked, or its pause is over."""
        return time.monotonic() >= self._retry_at.get(model, 0.0)

    def _counts(self, model: str) -> dict[str, float]:
        return self._loads.setdefault(model, {"loaded": 0, "seconds": 0.0, "failed": 0})

    def _end(self, seconds: float, **more: bool) -> None:
        if self._swap:
            self._swaps.append(self._swap | {"seconds": round(seconds, 1)} | more)
            del self._swaps[:-MOST_SWAPS]
        self._swap = {}


def text_of(error: BaseException) -> str:
    """Return the first line of an error, or of the errors of a group."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(map(text_of, error.exceptions))
    if isinstance(error, StoreUnavailable):
        return error.message
    return next(iter(str(error).splitlines()), "") or type(error).__name__
