"""The requests this worker holds: leased, and not committed yet."""

import asyncio
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from contract.message import Delivery
from worker.drain.leases import lease_number

#: Aborts that end a request, and what its author is told. The others hand it back
#: (`released`) or leave it to whoever holds its lease now (`lost`).
ABORTS = {"cancelled": "cancelled by the user", "expired": "not finished before its deadline"}


@dataclass(slots=True, eq=False)
class Running:
    """One request in flight; `abort` says why its task was cancelled, `died` that the
    engine died with it inside. The engine knows it by `engine_id`; `since` is the
    time.monotonic() at which its task began; `plain` says that somebody wants its text while it
    runs, and that this is what its answer will say, word for word; `text_seen` that a listener
    was told of it."""

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
    """Running requests by lease. Iterates oldest lease first, over a copy (control commands
    look in from another thread)."""

    def __init__(self) -> None:
        self._by_lease: dict[str, Running] = {}
        #: The latest delivery of each request.
        self._by_request: dict[str, Running] = {}
        #: Leases of deliveries that a later one stands for, until Redis has dropped them.
        self._exchanged: set[str] = set()
        #: The bytes of all messages in flight, as they stand in Redis.
        self.size = 0

    def __len__(self) -> int:
        return len(self._by_lease)

    def __iter__(self) -> Iterator[Running]:
        return iter(
            sorted(list(self._by_lease.values()), key=lambda r: lease_number(r.delivery.lease))
        )

    def leases(self) -> list[str]:
        """Return all leases, in no order."""
        return [*self._by_lease, *self._exchanged]

    def oldest_s(self) -> float:
        """Return since when the request that began first is held, in seconds; 0 without one. In
        any thread."""
        began = [running.since for running in list(self._by_lease.values()) if running.since]
        return time.monotonic() - min(began) if began else 0.0

    def get(self, lease: str) -> Running | None:
        """Return the request with that lease, if it is still in flight."""
        return self._by_lease.get(lease)

    def add(self, delivery: Delivery) -> Running:
        """Take a delivery in."""
        engine_id = delivery.request_id
        if engine_id in self._by_request and self.unended(
            engine_id
        ):  # another request has that id: anybody may choose one
            engine_id = f"{engine_id}#{lease_number(delivery.lease)}"
        running = self._by_lease[delivery.lease] = Running(delivery, engine_id)
        self._by_request[delivery.request_id] = running
        self.size += delivery.size
        return running

    def drop(self, lease: str) -> None:
        """Forget a lease that is committed, handed back or lost, and the request it was of."""
        self._exchanged.discard(lease)
        running = self._by_lease.pop(lease, None)
        if running is None:
            return
        self.size -= running.delivery.size
        request_id = running.delivery.request_id
        if self._by_request.get(request_id) is running:
            del self._by_request[request_id]
        if running.timer is not None:
            running.timer.cancel()  # it would hold the request until a deadline that may be far

    def twin(self, delivery: Delivery) -> Running | None:
        """Return the same request, if it is in flight by an earlier delivery."""
        running = self.unended(delivery.request_id)
        return running if running and running.delivery.same_request(delivery) else None

    def exchange(self, running: Running, delivery: Delivery) -> Delivery:
        """Let a later delivery of the same request stand for it; return the earlier one.

        The earlier lease is held until it is dropped.
        """
        earlier, running.delivery = running.delivery, delivery
        del self._by_lease[earlier.lease]
        self._exchanged.add(earlier.lease)
        self._by_lease[delivery.lease] = running
        self.size += delivery.size - earlier.size
        return earlier

    def unended(self, request_id: str) -> Running | None:
        """Return a request that has not ended yet, if it is in flight."""
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
                # Not at once: a task cancelled before its first step ends without an ending.
                asyncio.get_running_loop().call_soon(running.task.cancel)
                if why == "lost":
                    self.drop(running.delivery.lease)
