"""What vLLM tells of each step of its engine."""

import asyncio
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
        self.ended: Callable[[], None] = _nobody

    def record(self, scheduler_stats: Any = None, *_: Any, **__: Any) -> None:
        self.at = time.monotonic()
        self.stepped()
        self.ended()
        hits = getattr(getattr(scheduler_stats, "prefix_cache_stats", None), "hits", 0)
        if hits:
            self.cached_tokens += hits

    def log_engine_initialized(self) -> None:
        self.at = time.monotonic()


def keep_no_statistics(engine: Any, args: Any) -> None:
    """Let an engine whose statistics nobody reads make none of its requests and their tokens.

    vLLM makes them as soon as it has a logger, and Progress is one; it needs the scheduler's alone.

    Args:
        engine: vLLM's AsyncLLM, which has had no request yet.
        args: the server's options, as vLLM's parser has them.
    """
    traced = engine.vllm_config.observability_config.otlp_traces_endpoint
    told = getattr(args, "enable_per_request_metrics", False)
    if args.disable_log_stats and not traced and not told:
        engine.log_stats = engine.output_processor.log_stats = False


async def log_stats(engine: Any, every_s: float) -> None:
    """Let vLLM log its statistics every so many seconds, until the engine dies."""
    while not engine.errored:
        await asyncio.sleep(every_s)
        await engine.do_log_stats()
