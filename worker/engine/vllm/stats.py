"""What vLLM tells of each step of its engine, and its span `llm_request` of sampled requests."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any

from worker.engine.vllm.names import IterationStats, StatLoggerBase

log = logging.getLogger(__name__)


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


# -- spans ---------------------------------------------------------------------------
# vLLM makes its span of statistics that it would keep of every token of every request. Here they
# are kept of the sampled ones alone, and only while one is in the engine: the others cost a look.
# What is used of vLLM's OutputProcessor is looked for first; a release without it runs untraced.


#: The headers of the request that the task runs, if it is sampled.
TRACE: ContextVar[Mapping[str, str] | None] = ContextVar("trace", default=None)
USED = (
    "add_request", "process_outputs", "do_tracing", "_update_stats_from_output",
    "_update_stats_from_finished", "request_states", "tracing_enabled", "log_stats",
)  # fmt: skip


def trace_requests(engine: Any) -> None:
    """Let an engine make its span of the requests that are given to it while TRACE is set.

    Args:
        engine: vLLM's AsyncLLM, which has had no request yet.
    """
    processor = engine.output_processor
    if IterationStats is None or not all(hasattr(processor, name) for name in USED):
        extra = {"action": "engine_untraced"}
        log.warning("this vLLM makes no spans as they are known here", extra=extra)
        return
    _Traced(processor)
    processor.tracing_enabled = True


class _Traced:
    """Stands before the methods of one OutputProcessor."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        #: The ids of sampled requests in the engine.
        self._ids: set[str] = set()
        for name in ("add_request", "process_outputs", "do_tracing"):
            theirs, ours = getattr(processor, name), getattr(self, name)
            setattr(self, f"_{name}", theirs)
            # With the signature of theirs: the fast path asks for it.
            setattr(processor, name, wraps(theirs)(partial(ours)))
        for name in ("_update_stats_from_output", "_update_stats_from_finished"):
            setattr(processor, name, _of_counted(getattr(processor, name)))

    def add_request(self, request: Any, *more: Any, **named: Any) -> Any:
        """Give the request its headers, and let it be counted."""
        headers = TRACE.get()
        # A learned form's requests are copies of its first one, which may have been sampled.
        request.trace_headers = headers
        if headers is None:
            return self._add_request(request, *more, **named)
        processor, kept = self._processor, self._processor.log_stats
        processor.log_stats = True  # it is read when the request's state is made
        try:
            added = self._add_request(request, *more, **named)
        finally:
            processor.log_stats = kept
        self._ids.add(request.request_id)
        return added

    def process_outputs(self, outputs: Any, timestamp: Any = None, stats: Any = None) -> Any:
        """Keep a step's statistics if one of its requests is sampled, and nobody else keeps any."""
        if self._ids:
            self._ids &= self._processor.request_states.keys()  # others were aborted
            if stats is None and self._ids:
                stats = IterationStats()
        return self._process_outputs(outputs, timestamp, stats)

    def do_tracing(self, output: Any, state: Any, stats: Any) -> None:
        """Make the span, if the request is sampled."""
        if output.trace_headers and state.stats is not None and stats is not None:
            self._do_tracing(output, state, stats)

    _add_request: Any
    _process_outputs: Any
    _do_tracing: Any


def _of_counted(update: Any) -> Any:
    """Return the method for requests of which statistics are kept; for others it does nothing."""

    def updating(state: Any, *more: Any) -> None:
        if state.stats is not None:
            update(state, *more)

    return updating
