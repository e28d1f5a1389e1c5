"""The worker's own series for Prometheus, read from the drain when somebody asks for them.

Nothing is written for a scrape that does not come, and none asks Redis: what lies there is shown by
the gateway, once for all workers.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import REGISTRY, Collector

from contract.histogram import samples
from contract.results import OUTCOMES
from contract.settings import SettingsError
from contract.version import version
from worker.drain.drain import Drain
from worker.drain.lifecycle import State
from worker.telemetry.reports import Seen, Told, counts_of, report_of, summed, together


class WorkerMetrics(Collector):
    """All series of one drain. Each has the labels `queue` and `model`."""

    def __init__(self, drain: Drain, parts: Callable[[], Sequence[Told]]) -> None:
        """Tell of a drain, and of the reports of further front ends that `parts` returns."""
        self._drain = drain
        self._parts = parts
        self._seen = Seen(drain.events)

    def describe(self) -> Iterable[Metric]:
        """Return nothing: names are checked when they are read."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield every series as it is now."""
        reports = [report_of(self._drain, self._seen), *self._parts()]
        seen = together(report["seen"] for report in reports if "seen" in report)
        yield InfoMetricFamily("warmq_build", "Version of warmq", {"version": version()})
        yield self._state()
        waits = bool(self._drain.supervisor.running and self._drain.supervisor.why)
        yield self._gauge("engine_waits", "1 while a server of the engine gets no requests", waits)
        yield from self._requests(reports)
        yield from self._slots(reports)
        yield from self._times(seen["durations"])
        yield from self._troubles(seen["happenings"], reports)
        yield from self._scripts(reports)

    def _labels(self) -> dict[str, str]:
        return {"queue": self._drain.settings.queue_to_drain, "model": self._drain.served}

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        found = GaugeMetricFamily(f"warmq_{name}", text)
        found.add_sample(found.name, self._labels(), value)
        return found

    def _counter(self, name: str, text: str, value: float) -> Metric:
        found = CounterMetricFamily(f"warmq_{name}", text)
        found.add_sample(f"{found.name}_total", self._labels(), value)
        return found

    def _histogram(self, name: str, text: str, of: Told) -> Metric:
        found = HistogramMetricFamily(f"warmq_{name}_seconds", text)
        for suffix, labels, value in samples(of["counts"], of["total"], self._labels()):
            found.add_sample(found.name + suffix, labels, value)
        return found

    def _state(self) -> Metric:
        found = GaugeMetricFamily("warmq_worker_state", "1 for the state that the worker is in")
        now, labels = self._drain.lifecycle.state, self._labels()
        for state in State:
            value = float(state is now)
            found.add_sample(found.name, {**labels, "state": state.value}, value)
        return found

    def _requests(self, reports: Sequence[Told]) -> Iterator[Metric]:
        counts, labels = counts_of(reports), self._labels()
        ended = CounterMetricFamily("warmq_requests", "Requests that have ended, by outcome")
        for outcome in OUTCOMES:
            value = float(counts[outcome])
            ended.add_sample("warmq_requests_total", {**labels, "outcome": outcome}, value)
        yield ended
        yield self._counter("requests_leased", "Requests taken from the queue", counts["popped"])
        yield self._counter(
            "requests_handed_back", "Requests put back into the queue", counts["handed_back"]
        )
        yield self._counter("prompt_tokens", "Tokens of prompts", counts["prompt_tokens"])
        yield self._counter("completion_tokens", "Tokens written", counts["completion_tokens"])
        yield self._counter(
            "cached_prompt_tokens",
            "Tokens of prompts that were found in the prefix cache",
            summed(reports, "cached_tokens"),
        )

    def _slots(self, reports: Sequence[Told]) -> Iterator[Metric]:
        used = sum(min(each["slots"], each["in_flight"]) for each in reports)
        oldest_s = max(each["oldest_s"] for each in reports)
        for name, text, value in (
            ("slots", "Requests that the engine runs at once", summed(reports, "slots")),
            ("slots_in_use", "Slots that have a request", used),
            ("in_flight", "Requests that the worker holds", summed(reports, "in_flight")),
        ):
            yield self._gauge(name, text, value)
        yield self._gauge(
            "oldest_in_flight_seconds", "Since when the oldest request is held", oldest_s
        )

    def _times(self, took: Told) -> Iterator[Metric]:
        for name, text, of in (
            ("request_engine", "Time from the engine's start of work to its answer", "engine"),
            ("request_queued", "Time from a batch's creation until a request was taken", "queued"),
            ("request", "Time from a batch's creation to a request's answer", "whole"),
        ):
            yield self._histogram(name, text, took[of])

    def _troubles(self, seen: Told, reports: Sequence[Told]) -> Iterator[Metric]:
        errors = summed(reports, "redis_errors")
        for name, text, value in (
            ("redeliveries", "Requests taken that were handed out before", seen["redelivered"]),
            ("leases_lost", "Leases that other workers have now", seen["leases_lost"]),
            ("leases_swept", "Requests of dead workers put back", seen["swept"]),
            ("engine_starts", "Engines that became ready", seen["engine_starts"]),
            ("engine_deaths", "Engines that died", seen["engine_deaths"]),
            ("redis_outages", "Times that Redis went away", seen["redis_outages"]),
            ("redis_errors", "Calls of scripts that Redis did not answer, or refused", errors),
        ):
            yield self._counter(name, text, value)
        yield self._gauge(
            "engine_start_seconds", "How long the latest engine took to start", seen["ready_s"]
        )

    def _scripts(self, reports: Sequence[Told]) -> Iterator[Metric]:
        calls = CounterMetricFamily("warmq_script_calls", "Calls of Redis scripts, by script")
        took = CounterMetricFamily("warmq_script_seconds", "Time until they were answered")
        counted, summed = Counter[str](), Counter[str]()
        for report in reports:
            for script, (number, seconds, _) in report["scripts"].items():
                counted[script] += number
                summed[script] += seconds
        for script in sorted(counted):
            labels = self._labels() | {"script": script}
            calls.add_sample("warmq_script_calls_total", labels, counted[script])
            took.add_sample("warmq_script_seconds_total", labels, summed[script])
        yield from (calls, took)


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
