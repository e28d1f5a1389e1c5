"""What the gateway itself has answered: how many requests, how they ended, how long they took."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from contract.histogram import Histogram, samples
from contract.openai.body import BODY_TYPES

#: The route of a request that no route takes, or that is refused before one is looked for.
NONE = "none"
#: Its caller went before there was an answer.
GONE = 499


class Requests:
    """Counts since the gateway's process started; used on its event loop alone.

    Not prometheus_client's own counters: with PROMETHEUS_MULTIPROC_DIR those write files.
    """

    def __init__(self, routes: Iterable[Route]) -> None:
        self._ended = Counter(
            {(route.path, method, 200): 0 for route in routes for method in route.methods or ()}
        )
        self._took = {url: Histogram() for url in BODY_TYPES}

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


class Counted:
    """Counts each request by its route."""

    def __init__(self, app: ASGIApp, requests: Requests) -> None:
        self._app, self._requests = app, requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), GONE

        async def send_noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_noting)
        except Exception:
            status = 500  # Starlette answers outside of all middlewares
            raise
        finally:
            seconds = time.monotonic() - began
            found, method = scope.get("route"), scope["method"]
            if isinstance(found, Route) and method in (found.methods or ()):
                self._requests.note(found.path, method, status, seconds)
            else:  # a stranger's method would be a label of its own
                self._requests.note(NONE, NONE, status, seconds)
