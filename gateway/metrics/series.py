"""Makes Prometheus series of workers, queues and this gateway's requests.

The values of all labels are bounded.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from contract.histogram import Histogram, samples
from contract.naming import PRIORITY_STEPS
from contract.redis.announced_models import can_load
from contract.redis.announcements import queues_of
from contract.redis.scripts import script_errors, script_times
from contract.version import version
from gateway.http.idempotency import ONLINE_BODY_TYPES
from gateway.redis.fleet import Fleet

#: Values of the label `tenant`: for tenants without series of their own, and for requests without a
#: tenant, which Celery clients have queued.
OTHER, CELERY = "other", "celery"
#: Scripts that have series before their first call, because clients wait for them.
SCRIPTS = ("batch_views", "object_put", "push")
STATES = ("starting", "ready", "swapping", "degraded", "draining")
#: Labels of a series, and its value.
Series = Iterable[tuple[dict[str, str], float]]


def series(
    fleet: Fleet | None, models: Mapping[str, str], tenants: Collection[str], high_water: float
) -> Iterator[Metric]:
    """Yield all series; if `fleet` is None (Redis cannot be read), only those that need no Redis.

    `models` has the model of each queue, `tenants` the tenants that have series with their names.
    """
    yield InfoMetricFamily("warmq_gateway_build", "Version of warmq", {"version": version()})
    yield _gauge(
        "redis_up", "1 if Redis could be read for this snapshot", [({}, fleet is not None)]
    )
    yield from _scripts()
    if fleet is None:
        return
    yield _waiting(fleet, models, tenants)
    yield _reused(fleet, tenants)
    yield from _workers(fleet)
    for name, text, by_queue in (
        ("load_tokens", "Tokens of waiting and running requests, for autoscalers", fleet.tokens),
        ("oldest_waiting_seconds", "Age of the oldest batch that waits", fleet.oldest_s),
        ("suspects", "Requests whose engine died, to be run apart", fleet.suspects),
        (
            "deadline_late_batches",
            "Batches that will miss their deadlines at today's rate",
            fleet.late,
        ),
    ):
        yield _gauge(name, text, (({"queue": queue}, n) for queue, n in by_queue.items()))
    for name, text, value in (
        ("dead_letters", "Dead letters", fleet.dead_letters),
        ("batches", "Batches of any state", fleet.batches),
        ("results_uncollected", "Results of the oldest batches that are not collected",
         fleet.uncollected),
        ("results_expire_seconds",
         "Seconds until the first uncollected result expires; infinite if none does",
         fleet.expire_s),
        ("leases", "Requests that workers have leased", fleet.leases),
        ("lease_overdue_seconds", "Seconds since the end of the oldest lease that was not swept",
         fleet.overdue_s),
        ("redis_memory_bytes", "Memory that Redis uses", fleet.memory_used),
        ("redis_memory_high_water_bytes", "Memory from which batches wait; 0 without a limit",
         fleet.memory_limit * high_water),
        ("redis_append_only", "1 if Redis writes an append-only file", fleet.append_only),
    ):  # fmt: skip
        yield _gauge(name, text, [({}, value)])


def _gauge(name: str, text: str, values: Series) -> Metric:
    gauge = GaugeMetricFamily(f"warmq_{name}", text)
    for labels, value in values:
        gauge.add_sample(gauge.name, labels, float(value))
    return gauge


def _counter(name: str, text: str, values: Series) -> Metric:
    counter = CounterMetricFamily(f"warmq_gateway_{name}", text)
    for labels, value in values:
        counter.add_sample(f"{counter.name}_total", labels, value)
    return counter


def _scripts() -> Iterator[Metric]:
    times = [({"script": script}, found) for script, found in sorted(script_times(SCRIPTS).items())]
    calls = ((labels, number) for labels, (number, _, _) in times)
    yield _counter("script_calls", "Calls of Redis scripts, by script", calls)
    seconds = ((labels, took) for labels, (_, took, _) in times)
    yield _counter(
        "script_seconds", "Seconds until calls of Redis scripts were answered, by script", seconds
    )
    yield _counter("redis_errors", "Calls of Redis scripts that failed", [({}, script_errors())])


def _waiting(fleet: Fleet, models: Mapping[str, str], tenants: Collection[str]) -> Metric:
    counts = Counter[tuple[str, int, str]](
        {(queue, step, CELERY): 0 for queue in fleet.queues for step in PRIORITY_STEPS}
    )
    for one in fleet.waiting:
        tenant = one.tenant if one.tenant in tenants else OTHER
        counts[one.queue, one.priority, tenant if one.tenant else CELERY] += one.requests
    names = ("queue", "model", "priority", "tenant")
    values = (
        (dict(zip(names, (queue, models.get(queue, ""), str(step), tenant), strict=True)), count)
        for (queue, step, tenant), count in sorted(counts.items())
    )
    return _gauge("waiting", "Requests in the queue", values)


def _reused(fleet: Fleet, tenants: Collection[str]) -> Metric:
    counts = Counter[str]()
    for tenant, lines in fleet.reused.items():
        counts[tenant if tenant in tenants else OTHER] += lines
    counter = CounterMetricFamily("warmq_reused", "Lines that known answers have answered")
    for tenant, lines in sorted(counts.items()):
        counter.add_sample("warmq_reused_total", {"tenant": tenant}, lines)
    return counter


def _workers(fleet: Fleet) -> Iterator[Metric]:
    states = Counter({(queue, state): 0 for queue in fleet.queues for state in STATES})
    slots, in_flight = Counter[str](), Counter[str]()
    for worker in fleet.workers:
        states[worker["queue"], str(worker.get("state"))] += 1
        slots[worker["queue"]] += _number(worker.get("slots"))
        in_flight[worker["queue"]] += _number(worker.get("in_flight"))
    by_state = (
        ({"queue": queue, "state": state}, count)
        for (queue, state), count in sorted(states.items())
        if state in STATES
    )
    yield _gauge("workers", "Workers that announce themselves, by state", by_state)
    not_loaded = Counter({queue: 0 for queue in fleet.queues})
    not_loaded.update(
        q for worker in fleet.workers for q in queues_of(worker) if can_load(worker, q)
    )
    for name, text, counts in (
        (
            "workers_not_loaded",
            "Workers that can load the queue's model, but have another",
            not_loaded,
        ),
        ("fleet_slots", "Slots of all workers", slots),
        ("fleet_in_flight", "Requests in flight of all workers", in_flight),
    ):
        yield _gauge(name, text, (({"queue": queue}, counts[queue]) for queue in fleet.queues))


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0


#: Route and method of a request that has no route, or was refused before routing.
NONE = "none"
#: Status of a request whose client closed the connection before there was an answer.
GONE = 499


class RouteCounts:
    """Counts requests by route since the process started; only for its event loop.

    prometheus_client's own counters are not used: they write files under PROMETHEUS_MULTIPROC_DIR.
    """

    def __init__(self, routes: Iterable[Route]) -> None:
        self._ended = Counter(
            {(route.path, method, 200): 0 for route in routes for method in route.methods or ()}
        )
        self._took = {url: Histogram() for url in ONLINE_BODY_TYPES}

    def note(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count a request that has ended."""
        self._ended[route, method, status] += 1
        if route in self._took and status == 200:
            self._took[route].add(seconds)

    def series(self) -> Iterator[Metric]:
        """Yield the counts."""
        ended = (
            ({"route": route, "method": method, "code": str(status)}, count)
            for (route, method, status), count in sorted(self._ended.items())
        )
        yield _counter("requests", "HTTP requests, by their answer", ended)
        name = "warmq_gateway_online_seconds"
        took = HistogramMetricFamily(
            name, "Seconds from an online request to the last byte of its answer"
        )
        for route, histogram in self._took.items():
            for suffix, labels, value in samples(
                histogram.counts, histogram.total, {"route": route}
            ):
                took.add_sample(name + suffix, labels, value)
        yield took


class CountRequests:
    """Counts each request by its route."""

    def __init__(self, app: ASGIApp, requests: RouteCounts) -> None:
        self._app, self._requests = app, requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        began, failed = time.monotonic(), False
        try:
            await self._app(scope, receive, send)
        except Exception:
            # RequestContext, the outer middleware, answers the error.
            failed = True
            raise
        finally:
            seconds = time.monotonic() - began
            status = 500 if failed else scope.get("warmq.status", GONE)
            route, method = scope.get("route"), scope["method"]
            if isinstance(route, Route) and method in (route.methods or ()):
                self._requests.note(route.path, method, status, seconds)
            else:  # else a client could choose the values of a label
                self._requests.note(NONE, NONE, status, seconds)
