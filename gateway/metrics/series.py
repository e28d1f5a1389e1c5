"""A fleet's series for Prometheus. Label values are from closed sets."""

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
from contract.redis.scripts import script_errors, script_times
from contract.version import version
from gateway.http.idempotency import ONLINE_BODY_TYPES
from gateway.redis.fleet import Fleet

OTHER, CELERY = "other", "celery"
#: Scripts that are told before their first call: clients wait for them.
SCRIPTS = ("batch_views", "object_put", "push")
STATES = ("starting", "ready", "degraded", "draining")


def series(
    fleet: Fleet | None, models: Mapping[str, str], tenants: Collection[str], high_water: float
) -> Iterator[Metric]:
    """Yield all series; without a fleet, that Redis could not be read, and nothing that is old.

    `models` has the name of what each queue's workers serve, as far as it was ever heard;
    `tenants` are told by their names, others together.
    """
    yield InfoMetricFamily("warmq_gateway_build", "Version of warmq", {"version": version()})
    yield _gauge("redis_up", "1 if Redis could be read for this page", [({}, fleet is not None)])
    yield from _scripts()
    if fleet is None:
        return
    yield from _waiting(fleet, models, tenants)
    yield from _workers(fleet)
    for name, text, value in (
        ("dead_letters", "Requests that cannot be run", fleet.dead_letters),
        ("batches", "Batches of any state", fleet.batches),
        ("results_uncollected", "Results of the oldest batches that nobody has collected",
         fleet.uncollected),
        ("results_expire_seconds", "Until the first of them expire; infinite if none does",
         fleet.expire_s),
        ("leases", "Requests that workers hold", fleet.leases),
        ("lease_overdue_seconds", "Since when a lease has ended and was not put back",
         fleet.overdue_s),
        ("redis_memory_bytes", "Memory that Redis uses", fleet.memory_used),
        ("redis_memory_high_water_bytes", "Memory from which batches wait; 0 without a limit",
         fleet.memory_limit * high_water),
        ("redis_append_only", "1 if Redis keeps an append-only file", fleet.append_only),
    ):  # fmt: skip
        yield _gauge(name, text, [({}, value)])


def _gauge(name: str, text: str, samples: Iterable[tuple[dict[str, str], float]]) -> Metric:
    found = GaugeMetricFamily(f"warmq_{name}", text)
    for labels, value in samples:
        found.add_sample(found.name, labels, float(value))
    return found


def _scripts() -> Iterator[Metric]:
    calls = CounterMetricFamily("warmq_gateway_script_calls", "Calls of Redis scripts, by script")
    took = CounterMetricFamily("warmq_gateway_script_seconds", "Time until they were answered")
    for script, (number, seconds, _) in sorted(script_times(SCRIPTS).items()):
        calls.add_sample("warmq_gateway_script_calls_total", {"script": script}, number)
        took.add_sample("warmq_gateway_script_seconds_total", {"script": script}, seconds)
    errors = CounterMetricFamily("warmq_gateway_redis_errors", "Calls of them that have failed")
    errors.add_sample("warmq_gateway_redis_errors_total", {}, script_errors())
    yield from (calls, took, errors)


def _waiting(fleet: Fleet, models: Mapping[str, str], tenants: Collection[str]) -> Iterator[Metric]:
    counts = Counter[tuple[str, int, str]](
        {(queue, step, CELERY): 0 for queue in fleet.queues for step in PRIORITY_STEPS}
    )
    for one in fleet.waiting:
        tenant = one.tenant if one.tenant in tenants else OTHER
        counts[one.queue, one.priority, tenant if one.tenant else CELERY] += one.requests
    yield _gauge(
        "waiting",
        "Requests in the queue",
        (
            (
                {
                    "queue": queue,
                    "model": models.get(queue, ""),
                    "priority": str(step),
                    "tenant": tenant,
                },
                count,
            )
            for (queue, step, tenant), count in sorted(counts.items())
        ),
    )
    held = (({"queue": queue}, tokens) for queue, tokens in fleet.tokens.items())
    yield _gauge("load_tokens", "What waits and what runs, in tokens, for autoscalers", held)
    by_queue = (({"queue": queue}, age) for queue, age in fleet.oldest_s.items())
    yield _gauge("oldest_waiting_seconds", "Age of the oldest batch that waits", by_queue)
    held = (({"queue": queue}, count) for queue, count in fleet.suspects.items())
    yield _gauge("suspects", "Requests that an engine died with, to be run apart", held)


def _workers(fleet: Fleet) -> Iterator[Metric]:
    states = Counter({(queue, state): 0 for queue in fleet.queues for state in STATES})
    sums: dict[str, Counter[str]] = {name: Counter() for name in ("slots", "in_flight")}
    for worker in fleet.workers:
        states[worker["queue"], str(worker.get("state"))] += 1
        for name, of in sums.items():
            of[worker["queue"]] += _number(worker.get(name))
    yield _gauge(
        "workers",
        "Workers that have announced themselves, by state",
        (
            ({"queue": queue, "state": state}, count)
            for (queue, state), count in sorted(states.items())
            if state in STATES
        ),
    )
    for name, text in (
        ("slots", "Requests that the engines of all workers run at once"),
        ("in_flight", "Requests that all workers hold"),
    ):
        by_queue = [({"queue": queue}, sums[name][queue]) for queue in fleet.queues]
        yield _gauge(f"fleet_{name}", text, by_queue)


def _number(told: Any) -> int:
    return told if isinstance(told, int) else 0


#: The route of a request that no route takes, or that is refused before one is looked for.
NONE = "none"
#: Its caller went before there was an answer.
GONE = 499


class RouteCounts:
    """Counts since the gateway's process started; used on its event loop alone.

    Not prometheus_client's own counters: with PROMETHEUS_MULTIPROC_DIR those write files.
    """

    def __init__(self, routes: Iterable[Route]) -> None:
        self._ended = Counter(
            {(route.path, method, 200): 0 for route in routes for method in route.methods or ()}
        )
        self._took = {url: Histogram() for url in ONLINE_BODY_TYPES}

    def note(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count a request that has its whole answer."""
        self._ended[route, method, status] += 1
        if route in self._took and status == 200:
            self._took[route].add(seconds)

    def series(self) -> Iterator[Metric]:
        """Yield what was counted."""
        ended = CounterMetricFamily("warmq_gateway_requests", "HTTP requests, by their answer")
        for (route, method, status), count in sorted(self._ended.items()):
            labels = {"route": route, "method": method, "code": str(status)}
            ended.add_sample("warmq_gateway_requests_total", labels, count)
        name = "warmq_gateway_online_seconds"
        took = HistogramMetricFamily(name, "Of answered online requests: time to the last byte")
        for route, of in self._took.items():
            for suffix, labels, value in samples(of.counts, of.total, {"route": route}):
                took.add_sample(name + suffix, labels, value)
        yield from (ended, took)


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
            failed = True  # it is answered outside of this
            raise
        finally:
            seconds = time.monotonic() - began
            status = 500 if failed else scope.get("warmq.status", GONE)
            found, method = scope.get("route"), scope["method"]
            if isinstance(found, Route) and method in (found.methods or ()):
                self._requests.note(found.path, method, status, seconds)
            else:  # a stranger's method would be a label of its own
                self._requests.note(NONE, NONE, status, seconds)
