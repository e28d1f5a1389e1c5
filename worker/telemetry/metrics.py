"""Serves the worker's /metrics for Prometheus, computed at each scrape without Redis.

Metrics of data in Redis are not here: the gateway exports them, once for all workers.
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
from contract.redis.announced_servers import shared_servers
from contract.results import OUTCOMES
from contract.settings import SettingsError
from contract.version import version
from worker.drain.announcement import shared_servers_of
from worker.drain.drain import Drain
from worker.drain.lifecycle import State
from worker.telemetry.reports import EventTotals, Report, counts_of, report_of, summed, totals_of

#: A function that returns the reports (worker/telemetry/reports.py) of further front ends.
Reports = Callable[[], Sequence[Report]]
#: Samples of one series: suffix, labels in addition to `queue` and `model`, and value.
Samples = Iterable[tuple[str, dict[str, str], float]]

#: The series of a report's `counts`: the series' name, its help text, and the field of `counts`.
COUNTS = (
    ("requests_leased", "Requests taken from the queue", "popped"),
    ("requests_handed_back", "Requests put back into the queue", "handed_back"),
    ("prompt_tokens", "Tokens of prompts", "prompt_tokens"),
    ("completion_tokens", "Tokens written", "completion_tokens"),
)
#: The series of a report's other fields: the series' name, its help text, and the field.
SUMS = (
    ("cached_prompt_tokens", "Tokens of prompts found in the prefix cache", "cached_tokens"),
    ("redis_errors", "Calls of scripts that Redis did not answer, or refused", "redis_errors"),
)
#: The series of a report's `happenings`: the series' name, its help text, and the field.
TOTALS = (
    ("redeliveries", "Requests taken that had been delivered before", "redelivered"),
    ("leases_lost", "Leases that other workers took over", "leases_lost"),
    ("leases_swept", "Requests of dead workers put back", "swept"),
    ("engine_starts", "Engines that became ready", "engine_starts"),
    ("engine_deaths", "Engines that died", "engine_deaths"),
    ("redis_outages", "Times that Redis became unreachable", "redis_outages"),
)
#: The histograms of a report's `durations`: the series' name, its help text, and the field.
DURATIONS = (
    ("request_engine", "Time in the engine, from its start to its answer", "engine"),
    ("request_queued", "Time from a batch's creation until a request was taken", "queued"),
    ("request", "Time from a batch's creation to a request's answer", "whole"),
)
#: The series of a server that people use: the series' name, its help text, the field of the row of
#: the server, and the field's unit in that of the series.
SERVERS = (
    ("requests", "Requests of all workers at the server", "in_flight", 1),
    ("limit", "Most requests of all workers at the server", "limit", 1),
    ("first_token_seconds", "Time to the first token that people feel", "ttft_ms", 0.001),
    ("first_token_target_seconds", "Target of that time", "ttft_ms_target", 0.001),
    ("between_tokens_seconds", "Mean time between tokens that people feel", "itl_ms", 0.001),
    ("between_tokens_target_seconds", "Target of that time", "itl_ms_target", 0.001),
    ("tokens_today", "Tokens written for all workers today (UTC)", "tokens_today", 1),
)


class WorkerMetrics(Collector):
    """Collects all series of a worker, with the labels `queue` and `model`.

    `peers` returns the reports of the worker's further front ends.
    """

    def __init__(self, drain: Drain, peers: Reports) -> None:
        self._drain = drain
        self._peers = peers
        self._totals = EventTotals(drain.events)

    def collect(self) -> Iterator[Metric]:
        """Yield every series with its present value."""
        reports = [report_of(self._drain, self._totals), *self._peers()]
        counts, totals = counts_of(reports), totals_of(reports)
        happenings = totals["happenings"]
        state = self._drain.lifecycle.state
        yield InfoMetricFamily("warmq_build", "Version of warmq", {"version": version()})
        yield self._family(
            GaugeMetricFamily("warmq_worker_state", "1 for the worker's present state, else 0"),
            [("", {"state": one.value}, float(one is state)) for one in State],
        )
        yield self._family(
            CounterMetricFamily("warmq_requests", "Requests that have ended, by outcome"),
            [("_total", {"outcome": one}, float(counts[one])) for one in OUTCOMES],
        )
        for name, text, value in self._gauges(reports, happenings["ready_s"]):
            yield self._family(GaugeMetricFamily(f"warmq_{name}", text), [("", {}, value)])
        for name, text, value in (
            *((name, text, counts[field]) for name, text, field in COUNTS),
            *((name, text, summed(reports, field)) for name, text, field in SUMS),
            *((name, text, happenings[field]) for name, text, field in TOTALS),
        ):
            yield self._family(CounterMetricFamily(f"warmq_{name}", text), [("_total", {}, value)])
        for name, text, field in DURATIONS:
            took = totals["durations"][field]
            family = HistogramMetricFamily(f"warmq_{name}_seconds", text)
            yield self._family(family, samples(took["counts"], took["total"], {}))
        yield from self._scripts(reports)
        yield from self._loads()
        yield from self._servers()

    def _family(self, family: Metric, values: Samples) -> Metric:
        labels = {"queue": self._drain.settings.queue_to_drain, "model": self._drain.served}
        for suffix, more, value in values:
            family.add_sample(family.name + suffix, labels | more, value)
        return family

    def _gauges(
        self, reports: Sequence[Report], start_s: float
    ) -> Iterator[tuple[str, str, float]]:
        supervisor = self._drain.supervisor
        waits = bool(supervisor.running and supervisor.why)
        used = sum(min(each["slots"], each["in_flight"]) for each in reports)
        oldest_s = max(each["oldest_s"] for each in reports)
        yield "engine_waits", "1 while a server of the engine gets no requests", waits
        yield "slots", "Requests that the engine runs at once", summed(reports, "slots")
        yield "slots_in_use", "Slots that have a request", used
        yield "in_flight", "Requests that the worker holds", summed(reports, "in_flight")
        yield "oldest_in_flight_seconds", "How long the oldest request has been held", oldest_s
        yield "engine_start_seconds", "How long the latest engine took to start", start_s

    def _loads(self) -> Iterator[Metric]:
        """Yield how often each of several models was loaded, and which engines cannot sleep."""
        queues, loads = self._drain.models.get("models", {}), self._drain.models.get("loads", {})
        labels_of = {m: {"model": m, "queue": queues[m]} for m in sorted(loads)}
        if not labels_of:
            return
        counts: Samples = [
            ("_total", labels | {"outcome": outcome}, float(loads[model][outcome]))
            for model, labels in labels_of.items() for outcome in ("loaded", "failed")
        ]  # fmt: skip
        took: Samples = [
            ("_total", labels, float(loads[m]["seconds"])) for m, labels in labels_of.items()
        ]
        sleepless = self._drain.models.get("sleep_failed", {})
        text = "1 if the model's engine does not sleep between stays, because that has failed"
        yield self._family(
            GaugeMetricFamily("warmq_model_sleep_failed", text),
            [("", labels, float(m in sleepless)) for m, labels in labels_of.items()],
        )
        for name, text, values in (
            ("warmq_model_loads", "Models that this worker has loaded, or could not load", counts),
            ("warmq_model_load_seconds", "Time until a model was loaded, swaps included", took),
        ):
            yield self._family(CounterMetricFamily(name, text), values)

    def _servers(self) -> Iterator[Metric]:
        """Yield what is known of each server that the engine shares with people."""
        # Another worker may have measured them: what it has published is read as by any reader.
        found = shared_servers([{"silent_s": 0.0, "shared": shared_servers_of(self._drain)}])
        for name, text, field, unit in SERVERS if found else ():
            values: Samples = [
                ("", {"server": one.server}, unit * value)
                for one in found if (value := getattr(one, field)) is not None
            ]  # fmt: skip
            yield self._family(GaugeMetricFamily(f"warmq_server_{name}", text), values)

    def _scripts(self, reports: Sequence[Report]) -> Iterator[Metric]:
        calls, seconds = Counter[str](), Counter[str]()
        for report in reports:
            for script, (called, took_s, _) in report["scripts"].items():
                calls[script] += called
                seconds[script] += took_s
        for name, text, totals in (
            ("warmq_script_calls", "Calls of Redis scripts, by script", calls),
            ("warmq_script_seconds", "Time until Redis answered the calls of scripts", seconds),
        ):
            values = [("_total", {"script": script}, totals[script]) for script in sorted(calls)]
            yield self._family(CounterMetricFamily(name, text), values)


#: The first characters of the names of vLLM's series, in prometheus_client's global registry.
VLLM = "vllm:"
#: The environment variables with which prometheus_client keeps each process's values in files.
#: These files are never removed, and each token is written to them. If the folder is missing, the
#: engine cannot start.
FILES = ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir")


class VllmSeries(Collector):
    """Collects vLLM's own series, if vLLM runs in this process."""

    def collect(self) -> Iterator[Metric]:
        """Yield vLLM's series with their present values."""
        if "vllm" in sys.modules:
            yield from (metric for metric in REGISTRY.collect() if metric.name.startswith(VLLM))


@contextmanager
def metrics_page(drain: Drain, peers: Reports) -> Iterator[None]:
    """Serve /metrics from its own thread while in the context, if WARMQ_METRICS_PORT is set.

    `peers` returns the reports of further front ends.

    Raises:
        SettingsError: the port is not available, or a variable of FILES is set.
    """
    address = drain.settings.metrics_address
    if address is None:
        yield
        return
    for name in FILES:
        if name in os.environ:
            raise SettingsError(
                f"{name}: a worker with WARMQ_METRICS_PORT serves all series from memory, not from "
                "this folder; unset it for the worker"
            )
    host, port = address
    registry = CollectorRegistry()
    registry.register(WorkerMetrics(drain, peers))
    registry.register(VllmSeries())
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise SettingsError(
            f"WARMQ_METRICS_PORT: cannot listen on {host}:{port}: {error.strerror}; choose another "
            "port, or stop the process that has it"
        ) from None
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
