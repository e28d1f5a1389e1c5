"""Reads vLLM's reports of engine steps, and makes its span `llm_request` for sampled requests."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any

from worker.engine.vllm.names import IterationStats, StatLoggerBase

log = logging.getLogger(__name__)


class Progress(StatLoggerBase):
    """Records the time of every engine step, because requests report only their final output.

    vLLM calls its statistics unstable, so only the prefix cache's hits are read, by the name that
    they have in 0.29. A release with another name shows none.
    """

    def __init__(self) -> None:
        self.at = time.monotonic()
        self.cached_tokens = 0
        self.stepped: Callable[[], None] = lambda: None
        self.ended: Callable[[], None] = lambda: None

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
    """Turn off an AsyncLLM's statistics of requests and tokens if nothing reads them.

    vLLM makes them if it has any logger. Progress is one, but does not need them.
    """
    traced = engine.vllm_config.observability_config.otlp_traces_endpoint
    by_request = getattr(args, "enable_per_request_metrics", False)
    if args.disable_log_stats and not traced and not by_request:
        engine.log_stats = engine.output_processor.log_stats = False


async def log_stats(engine: Any, every_s: float) -> None:
    """Make vLLM log its statistics every `every_s` seconds, until the engine dies."""
    while not engine.errored:
        await asyncio.sleep(every_s)
        await engine.do_log_stats()


# -- spans ---------------------------------------------------------------------------
# vLLM makes a span from statistics of every token, and keeps these for every request. Here they are
# kept only for sampled requests, while such a request is in the engine.


#: The trace headers of the current task's request, or None if it is not sampled.
TRACE: ContextVar[Mapping[str, str] | None] = ContextVar("trace", default=None)
#: Attributes of vLLM's OutputProcessor that tracing uses; without one of them nothing is traced.
USED = (
    "add_request", "process_outputs", "do_tracing", "_update_stats_from_output",
    "_update_stats_from_finished", "request_states", "tracing_enabled", "log_stats",
)  # fmt: skip


def trace_requests(engine: Any) -> None:
    """Make an AsyncLLM trace requests for which TRACE is set. Called before its first request."""
    processor = engine.output_processor
    if IterationStats is None or not all(hasattr(processor, name) for name in USED):
        extra = {"action": "engine_untraced"}
        log.warning("this vLLM makes its spans in a way that is not known here", extra=extra)
        return
    _Traced(processor)
    processor.tracing_enabled = True


class _Traced:
    """Wraps the methods of one OutputProcessor, to keep statistics only for sampled requests."""

    _add_request: Any
    _process_outputs: Any
    _do_tracing: Any

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        #: The ids of the sampled requests that are in the engine.
        self._ids: set[str] = set()
        for name in ("add_request", "process_outputs", "do_tracing"):
            theirs, ours = getattr(processor, name), getattr(self, name)
            setattr(self, f"_{name}", theirs)
            # Our method gets the signature of vLLM's, which the fast path reads.
            setattr(processor, name, wraps(theirs)(partial(ours)))
        for name in ("_update_stats_from_output", "_update_stats_from_finished"):
            setattr(processor, name, _if_counted(getattr(processor, name)))

    def add_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Add a request with its trace headers, and with statistics if it is sampled."""
        headers = TRACE.get()
        # Requests of the fast path are copies of an observed request, which may have been sampled.
        request.trace_headers = headers
        if headers is None:
            return self._add_request(request, *args, **kwargs)
        processor, before = self._processor, self._processor.log_stats
        processor.log_stats = True  # vLLM reads it when it makes the request's state
        try:
            added = self._add_request(request, *args, **kwargs)
        finally:
            processor.log_stats = before
        self._ids.add(request.request_id)
        return added

    def process_outputs(
        self, outputs: Any, timestamp: Any = None, stats: Any = None, **kwargs: Any
    ) -> Any:
        """Make statistics of a step if a sampled request is running and vLLM makes none."""
        if self._ids:
            self._ids &= self._processor.request_states.keys()  # the other ids were aborted
            if stats is None and self._ids:
                stats = IterationStats()
        return self._process_outputs(outputs, timestamp, stats, **kwargs)

    def do_tracing(self, output: Any, state: Any, stats: Any) -> None:
        """Make the span of a sampled request."""
        if output.trace_headers and state.stats is not None and stats is not None:
            self._do_tracing(output, state, stats)


def _if_counted(update: Any) -> Any:
    """Wrap a method so that it does nothing for requests without statistics."""

    def updating(state: Any, *args: Any) -> None:
        if state.stats is not None:
            update(state, *args)

    return updating
