"""Serves /metrics from a snapshot, which is taken while somebody scrapes and never in a scrape; and
/warmq/v1/scale, what autoscalers ask."""

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

#: Between two snapshots, and for how long they are taken after a scrape, in seconds.
EVERY_S, WATCHED_S = 10.0, 120.0
#: A snapshot is not told any more after so long: Redis hangs, or is asked again and again.
STALE_S = 3 * EVERY_S
#: Queues that are remembered.
MOST_QUEUES = 1000
#: Tenants that are named, for as long as the gateway lives: else every one that ever had most
#: waiting for a moment would be a series of its own.
MOST_TENANTS = 50
#: The first scrape waits so long for a first snapshot.
FIRST_S = 2.0


class Snapshots(Collector):
    """The latest snapshot of the fleet; old ones are not told."""

    def __init__(self, services: Services, requests: RouteCounts) -> None:
        self._services = services
        self._requests = requests
        self._reads = FleetReads.using(services.batches)
        self._fleet: Fleet | None = None
        self._taken_at = -STALE_S
        #: A queue is told of although its workers have all died, and before it has any.
        self._queues = {services.settings.queue}
        #: What its workers serve, or served.
        self._models: dict[str, str] = {}
        self._tenants: set[str] = set()
        self._since_ms = 0.0
        self._scraped_at = -WATCHED_S
        self._wanted = asyncio.Event()
        self._taken = asyncio.Event()

    def collect(self) -> list[Metric]:
        """Return every series as of the snapshot."""
        fresh = time.monotonic() - self._taken_at < STALE_S
        of_fleet = series(
            self._fleet if fresh else None,
            self._models,
            self._tenants,
            self._services.settings.high_water,
        )
        return [*of_fleet, *self._requests.series()]

    async def watched(self) -> None:
        """Note that somebody looks; wait for a first snapshot, but not long."""
        self._scraped_at = time.monotonic()
        self._wanted.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_S):
                await self._taken.wait()

    async def run(self) -> None:
        """Take snapshots while somebody looks, until cancelled."""
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
        try:
            began = time.monotonic()
            self._fleet, self._taken_at = await asyncio.to_thread(self._read), began
        except WarmqError as error:
            self._fleet = None
            log.warning("no metrics: %s", error.message, extra={"action": "no_metrics"})
        except Exception:  # what a stranger wrote must not end the page
            self._fleet = None
            log.exception("no metrics", extra={"action": "no_metrics"})

    def _read(self) -> Fleet:
        queues, self._since_ms = self._reads.queues_of_batches(self._since_ms)
        self._remember(queues)
        fleet = self._reads.fleet(self._queues)
        self._remember(fleet.queues)
        self._models.update(
            (queue, name) for queue, name in fleet.models.items() if queue in self._queues
        )
        self._name_tenants(fleet)
        return fleet

    def _remember(self, queues: Iterable[str]) -> None:
        new = sorted(set(queues) - self._queues)[: MOST_QUEUES - len(self._queues)]
        self._queues.update(new)
        prefix = f"{self._services.settings.queue}."
        for queue in new:
            self._models.setdefault(queue, queue.removeprefix(prefix))

    def _name_tenants(self, fleet: Fleet) -> None:
        """Name those that are new, the ones with most waiting first, as long as there is room."""
        most = Counter[str]()
        for one in fleet.waiting:
            if one.tenant and one.tenant not in self._tenants:
                most[one.tenant] += one.requests
        room = MOST_TENANTS - len(self._tenants)
        self._tenants.update(name for name, _ in most.most_common(room))


@contextlib.asynccontextmanager
async def metrics(services: Services, requests: RouteCounts) -> AsyncIterator[Snapshots]:
    """Take snapshots in the background while the context is open."""
    snapshots = Snapshots(services, requests)
    async with background(snapshots.run):
        yield snapshots


async def _metrics(request: Request) -> Response:
    snapshots: Snapshots = request.app.state.metrics
    await snapshots.watched()
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(snapshots), media_type=None, headers={"content-type": content_type})


def _scale(request: Request) -> Response:
    """Answer for `?model=`, or for the default queue: one JSON for KEDA's trigger `metrics-api`.

    The model need not be served now: one that was scaled to zero is asked for just then.
    """
    model, used = request.query_params.get("model", ""), services(request)
    if model or caller(request).models is not None:
        check_model(caller(request), model)
    queue = queue_name(model, used.settings.queue)
    told = Loads.using(used.batches).load(queue)
    return reply(told, headers={"Cache-Control": "no-store"})


def routes() -> list[Route]:
    """Return the routes of the page, and of what autoscalers ask."""
    return [Route("/metrics", _metrics), Route("/warmq/v1/scale", _scale)]
