"""Serves /metrics: the worker's own series, and those of an engine that runs in this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import REGISTRY, Collector

from contract.settings import SettingsError
from worker.drain.loop import Drain
from worker.telemetry.metrics import WorkerMetrics
from worker.telemetry.seen import Told

#: vLLM writes its series, all named so, into the library's global registry.
VLLM = "vllm:"
#: With one of these the library keeps vLLM's values in files, one a process, for a server that
#: gathers them: they are never removed, a folder that is missing ends the engine's start, and
#: each token is written through a mapping.
FILES = ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir")


class VllmSeries(Collector):
    """vLLM's own series, if an engine of it runs in this process."""

    def describe(self) -> list[Metric]:
        """Return nothing: names are checked when they are read."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield them as they are now."""
        if "vllm" in sys.modules:
            yield from (found for found in REGISTRY.collect() if found.name.startswith(VLLM))


@contextmanager
def metrics_page(drain: Drain, parts: Callable[[], Sequence[Told]]) -> Iterator[None]:
    """Serve the page while the context is open, on a port and a thread of its own; without
    `metrics_port` do nothing. `parts` returns the reports of further front ends.

    Raises:
        SettingsError: the port cannot be had, or the environment wants values in files.
    """
    address = drain.settings.metrics_address
    if address is None:
        yield
        return
    for name in FILES:
        if name in os.environ:
            raise SettingsError(
                f"{name}: a worker with WARMQ_METRICS_PORT serves all its series from memory, and "
                "not from this folder; unset it for the worker"
            )
    host, port = address
    registry = CollectorRegistry()
    registry.register(WorkerMetrics(drain, parts))
    registry.register(VllmSeries())
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise SettingsError(
            f"WARMQ_METRICS_PORT: nothing can listen on {host}:{port}: {error.strerror}; give "
            "another port, or stop what has it"
        ) from None
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
