"""The requests this worker has in flight: leased, and not committed yet."""

import asyncio
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from contract.message import Delivery
from worker.drain.leases import lease_number

#: Aborts that end a request, and its error's text. `released` hands it back, `lost` leaves it to
#: the worker that has its lease now.
ABORTS = {"cancelled": "cancelled by the user", "expired": "not finished before its deadline"}


@dataclass(slots=True, eq=False)
class Running:
    """One request in flight.

    `abort` is why its task was cancelled, `died` that the engine died with it inside, `since` the
    time.monotonic() at which its task began. `plain`: somebody wants its text while it runs, and
    that text is its answer word for word. `text_seen`: a listener has got some of it.
    """

    delivery: Delivery
    engine_id: str
    task: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None
    abort: str = ""
    ended: bool = False
    died: bool = False
    since: float = 0.0
    plain: bool = False
    text_seen: bool = False


class InFlight:
    """Running requests by lease; iterates over a copy, oldest lease first, in any thread."""

    def __init__(self) -> None:
        self._by_lease: dict[str, Running] = {}
        #: The latest delivery of each request.
        self._by_request: dict[str, Running] = {}
        #: Leases that a later delivery of the same request replaces, until Redis has dropped them.
        self._replaced: set[str] = set()
        #: Bytes of all messages in flight, as stored in Redis.
        self.size = 0

    def __len__(self) -> int:
        return len(self._by_lease)

    def __iter__(self) -> Iterator[Running]:
        return iter(
            sorted(list(self._by_lease.values()), key=lambda r: lease_number(r.delivery.lease))
        )

    def leases(self) -> list[str]:
        """Return all leases, in no order."""
        return [*self._by_lease, *self._replaced]

    def oldest_s(self) -> float:
        """Return the seconds since the first running request began, 0 without one; any thread."""
        began = [running.since for running in list(self._by_lease.values()) if running.since]
        return time.monotonic() - min(began) if began else 0.0

    def get(self, lease: str) -> Running | None:
        """Return the request with that lease, if it is in flight."""
        return self._by_lease.get(lease)

    def add(self, delivery: Delivery) -> Running:
        """Add a delivery."""
        engine_id = delivery.request_id
        # Another request may have that id: anybody may choose one.
        if engine_id in self._by_request and self.unended(engine_id):
            engine_id = f"{engine_id}#{lease_number(delivery.lease)}"
        running = self._by_lease[delivery.lease] = Running(delivery, engine_id)
        self._by_request[delivery.request_id] = running
        self.size += delivery.size
        return running

    def drop(self, lease: str) -> None:
        """Forget a lease that is committed, handed back or lost, and its request."""
        self._replaced.discard(lease)
        running = self._by_lease.pop(lease, None)
        if running is None:
            return
        self.size -= running.delivery.size
        request_id = running.delivery.request_id
        if self._by_request.get(request_id) is running:
            del self._by_request[request_id]
        if running.timer is not None:
            running.timer.cancel()  # it would hold the request until a deadline that may be far

    def same_request(self, delivery: Delivery) -> Running | None:
        """Return the running request of an earlier delivery of the same request."""
        running = self.unended(delivery.request_id)
        return running if running and running.delivery.same_request(delivery) else None

    def replace_delivery(self, running: Running, delivery: Delivery) -> Delivery:
        """Replace a request's delivery by a later one; return the earlier one.

        The earlier lease stays in `leases` until it is dropped.
        """
        earlier, running.delivery = running.delivery, delivery
        del self._by_lease[earlier.lease]
        self._replaced.add(earlier.lease)
        self._by_lease[delivery.lease] = running
        self.size += delivery.size - earlier.size
        return earlier

    def unended(self, request_id: str) -> Running | None:
        """Return a request in flight that has not ended yet."""
        running = self._by_request.get(request_id)
        return None if running is None or running.ended else running

    def tasks(self) -> list[asyncio.Task[None]]:
        """Return the tasks that still run."""
        return [r.task for r in self._by_lease.values() if r.task and not r.task.done()]

    def abort(self, which: Iterable[Running], why: str) -> None:
        """Stop requests in the engine; `why` is cancelled, expired, released, lost or died."""
        for running in which:
            if running.task is not None and not running.ended and not running.abort:
                running.abort = why
                # Later: a task that is cancelled before its first step ends without an ending.
                asyncio.get_running_loop().call_soon(running.task.cancel)
                if why == "lost":
                    self.drop(running.delivery.lease)
