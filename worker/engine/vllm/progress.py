"""What vLLM tells of each step of its engine."""

import time
from collections.abc import Callable
from typing import Any

from worker.engine.vllm.names import StatLoggerBase


def _nobody() -> None:
    """Take the place of who wants to know of steps."""


class Progress(StatLoggerBase):
    """Stamps every engine step: with final-only output nothing else shows progress.

    vLLM calls these classes unstable, so the call itself is used, and of what it tells only the
    prompt tokens found in the prefix cache, where a release tells them under the name of 0.29.
    """

    def __init__(self) -> None:
        self.at = time.monotonic()
        self.cached_tokens = 0
        self.stepped: Callable[[], None] = _nobody

    def record(self, scheduler_stats: Any = None, *_: Any, **__: Any) -> None:
        self.at = time.monotonic()
        self.stepped()
        hits = getattr(getattr(scheduler_stats, "prefix_cache_stats", None), "hits", 0)
        if hits:
            self.cached_tokens += hits

    def log_engine_initialized(self) -> None:
        self.at = time.monotonic()
