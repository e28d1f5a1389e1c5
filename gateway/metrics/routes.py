"""Has the routes /metrics for Prometheus and /warmq/v1/scale for autoscalers.

/metrics serves a snapshot of all workers and queues (a Fleet). Snapshots are taken in the
background as long as /metrics is scraped, never during a scrape.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from contract.errors import WarmqError
from contract.naming import queue_name
from gateway.background import background
from gateway.http.json_api import caller, reply, services
from gateway.http.limits import check_model
from gateway.http.services import Services
from gateway.metrics.series import RouteCounts, series
from gateway.redis.fleet import Fleet, FleetReads, Loads

log = logging.getLogger(__name__)

#: Seconds between two snapshots, and seconds after a scrape for which snapshots are taken.
EVERY_S, WATCHED_S = 10.0, 120.0
#: Seconds after which a snapshot is not served any more.
STALE_S = 3 * EVERY_S
#: Most queues that have series.
MAX_QUEUES = 1000
#: Most tenants that have series with their names, until the gateway ends.
MAX_TENANTS = 50
#: Seconds for which the first scrape waits for a snapshot.
FIRST_S = 2.0


class Snapshots(Collector):
    """Takes snapshots of all workers and queues, and makes series from the latest one."""

    def __init__(self, services: Services, requests: RouteCounts) -> None:
        self._services = services
        self._requests = requests
        self._reads = FleetReads.using(services.batches)
        self._fleet: Fleet | None = None
        self._taken_at = -STALE_S
        #: Queues with series. The default queue has them before any worker starts, and every queue
        #: keeps them after its workers have died.
        self._queues = {services.settings.queue}
        self._models: dict[str, str] = {}
        self._tenants: set[str] = set()
        self._since_ms = 0.0
        self._scraped_at = -WATCHED_S
        self._wanted = asyncio.Event()
        self._taken = asyncio.Event()

    def collect(self) -> list[Metric]:
        """Return all series, as of the latest snapshot."""
        fleet = self._fleet if time.monotonic() - self._taken_at < STALE_S else None
        high_water = self._services.settings.high_water
        of_fleet = series(fleet, self._models, self._tenants, high_water)
        return [*of_fleet, *self._requests.series()]

    async def note_scrape(self) -> None:
        """Note a scrape; wait briefly if there is no snapshot yet."""
        self._scraped_at = time.monotonic()
        self._wanted.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_S):
                await self._taken.wait()

    async def run(self) -> None:
        """Take snapshots as long as /metrics is scraped, until cancelled."""
        while True:
            await self._wanted.wait()
            await self._take()
            self._taken.set()
            if time.monotonic() - self._scraped_at > WATCHED_S:
                self._wanted.clear()
                self._taken.clear()
                self._fleet = None
            else:
                await asyncio.sleep(EVERY_S)

    async def _take(self) -> None:
        began, fleet = time.monotonic(), None
        try:
            fleet = await asyncio.to_thread(self._read)
        except WarmqError as error:
            log.warning("no metrics: %s", error.message, extra={"action": "no_metrics"})
        except Exception:  # another program may have written malformed data into Redis
            log.exception("no metrics", extra={"action": "no_metrics"})
        self._fleet, self._taken_at = fleet, began

    def _read(self) -> Fleet:
        queues, self._since_ms = self._reads.queues_of_batches(self._since_ms)
        self._remember(queues)
        fleet = self._reads.fleet(self._queues)
        self._remember(fleet.queues)
        models = fleet.models.items()
        self._models.update((queue, name) for queue, name in models if queue in self._queues)
        waiting = Counter[str]()
        for one in fleet.waiting:
            if one.tenant and one.tenant not in self._tenants:
                waiting[one.tenant] += one.requests
        most = waiting.most_common(MAX_TENANTS - len(self._tenants))
        self._tenants.update(name for name, _ in most)
        return fleet

    def _remember(self, queues: Iterable[str]) -> None:
        new = sorted(set(queues) - self._queues)[: MAX_QUEUES - len(self._queues)]
        self._queues.update(new)
        prefix = f"{self._services.settings.queue}."
        for queue in new:
            self._models.setdefault(queue, queue.removeprefix(prefix))


@contextlib.asynccontextmanager
async def metrics(services: Services, requests: RouteCounts) -> AsyncIterator[Snapshots]:
    """Take snapshots in the background while the context is open."""
    snapshots = Snapshots(services, requests)
    async with background(snapshots.run):
        yield snapshots


async def _metrics(request: Request) -> Response:
    snapshots: Snapshots = request.app.state.metrics
    await snapshots.note_scrape()
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(snapshots), media_type=None, headers={"content-type": content_type})


def _load(request: Request) -> Response:
    """Return the load of a model's queue, for KEDA's trigger `metrics-api`.

    Without `?model=` the queue is the default one. The model may have no worker: an autoscaler that
    has scaled it to zero asks for its load, too.
    """
    model, used = request.query_params.get("model", ""), services(request)
    if model or caller(request).models is not None:
        check_model(caller(request), model)
    queue = queue_name(model, used.settings.queue)
    load = Loads.using(used.batches).load(queue)
    return reply(load, headers={"Cache-Control": "no-store"})


def routes() -> list[Route]:
    """Return the routes."""
    return [Route("/metrics", _metrics), Route("/warmq/v1/scale", _load)]
