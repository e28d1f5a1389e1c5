"""Keeps the requests that this worker has in flight: leased, and not committed yet."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from contract.batch import BY_USER
from contract.message import Delivery
from worker.drain.leases import lease_number

#: The error texts of requests that an abort ends, by the abort's reason. Other aborts do not end
#: the request: after `released` and `died` it is handed back; after `lost` its lease is lost.
_ERRORS = {"cancelled": BY_USER, "expired": "not finished before its deadline"}


class Running(Struct, eq=False):
    """One request in flight.

    `engine_id` is the request's id in the engine. `task` runs the request; `timer` aborts it at its
    deadline. `abort` is the reason why the task was cancelled; `error` is the text of the error
    with which the request then ends, '' if it does not end. `died`: the engine died with the
    request inside. `since` is the time.monotonic() at which the task began. `streams_answer`: a
    listener wants the request's text while it runs, and that text is the answer word for word.
    `text_seen`: a listener has got some of the text.
    """

    delivery: Delivery
    engine_id: str
    task: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None
    abort: str = ""
    error: str = ""
    ended: bool = False
    died: bool = False
    since: float = 0.0
    streams_answer: bool = False
    text_seen: bool = False


class InFlight:
    """The requests in flight by lease.

    An iteration is over a copy, by age of the leases, oldest first; any thread may iterate.
    """

    def __init__(self) -> None:
        self._by_lease: dict[str, Running] = {}
        #: The latest delivery of each request.
        self._by_request: dict[str, Running] = {}
        #: Leases whose request has a later delivery, until `drop` removes them.
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
        """Return all leases, in no particular order."""
        return [*self._by_lease, *self._replaced]

    def oldest_s(self) -> float:
        """Return the seconds since the longest-running request began, 0 if none runs.

        Any thread may call this.
        """
        began = [running.since for running in list(self._by_lease.values()) if running.since]
        return time.monotonic() - min(began) if began else 0.0

    def get(self, lease: str) -> Running | None:
        """Return the request in flight with this lease, or None."""
        return self._by_lease.get(lease)

    def add(self, delivery: Delivery) -> Running:
        """Add a delivery, and return its request in flight."""
        engine_id = delivery.request_id
        # Two different requests may have the same id, because clients choose ids.
        if engine_id in self._by_request and self.unended(engine_id):
            engine_id = f"{engine_id}#{lease_number(delivery.lease)}"
        running = self._by_lease[delivery.lease] = Running(delivery, engine_id)
        self._by_request[delivery.request_id] = running
        self.size += delivery.size
        return running

    def drop(self, lease: str) -> None:
        """Remove a lease that was committed, handed back or lost, with its request."""
        self._replaced.discard(lease)
        running = self._by_lease.pop(lease, None)
        if running is None:
            return
        self.size -= running.delivery.size
        request_id = running.delivery.request_id
        if self._by_request.get(request_id) is running:
            del self._by_request[request_id]
        if running.timer is not None:
            running.timer.cancel()  # it would keep the request in memory until its deadline

    def same_request(self, delivery: Delivery) -> Running | None:
        """Return the request in flight if this delivery repeats it, or None."""
        running = self.unended(delivery.request_id)
        return running if running and running.delivery.same_request(delivery) else None

    def replace_delivery(self, running: Running, delivery: Delivery) -> Delivery:
        """Replace a request's delivery by a later one, and return the earlier delivery.

        `leases` still returns the earlier lease until `drop` removes it.
        """
        earlier, running.delivery = running.delivery, delivery
        del self._by_lease[earlier.lease]
        self._replaced.add(earlier.lease)
        self._by_lease[delivery.lease] = running
        self.size += delivery.size - earlier.size
        return earlier

    def unended(self, request_id: str) -> Running | None:
        """Return the request with this id if it is in flight and has not ended, or None."""
        running = self._by_request.get(request_id)
        return None if running is None or running.ended else running

    def tasks(self) -> list[asyncio.Task[None]]:
        """Return the tasks that still run."""
        return [r.task for r in self._by_lease.values() if r.task and not r.task.done()]

    def abort(self, which: Iterable[Running], why: str, error: str = "") -> None:
        """Abort requests; `why` is cancelled, expired, released, lost or died.

        Requests that end have `error` as their error's text, by default that of `why`.
        """
        for running in which:
            if running.task is not None and not running.ended and not running.abort:
                running.abort, running.error = why, error or _ERRORS.get(why, "")
                # In the loop's next iteration: a task cancelled before its first step would end
                # without making an ending.
                asyncio.get_running_loop().call_soon(running.task.cancel)
                if why == "lost":
                    self.drop(running.delivery.lease)


def perhaps_inside(which: Sequence[Running], slots: int) -> list[Running]:
    """Return the requests that may be in one of the engine's slots; the rest waits in it.

    A request starts after those of the same or a higher priority that came before it. If as many of
    these as there are slots are still in flight, it has not started. `which` is in order of the
    leases. In an engine that ignores priorities the requests in the slots are among the returned.
    """
    before: Counter[int] = Counter()
    inside = []
    for running in which:
        priority = running.delivery.priority
        if sum(count for step, count in before.items() if step <= priority) < slots:
            inside.append(running)
        before[priority] += 1
    return inside
