"""vLLM's own statistics in the worker's log, as its server writes them."""

from __future__ import annotations

import asyncio
from typing import Any


async def log_stats(engine: Any, every_s: float) -> None:
    """Have an engine log throughput, cache hits and accepted drafts until it is dead."""
    while not engine.errored:
        await asyncio.sleep(every_s)
        await engine.do_log_stats()
