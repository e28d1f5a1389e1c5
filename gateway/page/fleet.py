"""The fleet as the page shows it: workers, slots, what waits; as much of it as a caller may see."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from contract.redis.announcements import is_alive, protocol_of
from contract.redis.waiting import Waiting, WaitingReads
from contract.version import PROTOCOL
from gateway.http.caller import Caller
from gateway.http.services import Services

_SHOWN = 200


@dataclass(slots=True)
class Fleet:
    """Living workers and dead ones, and sums of the living: slots, requests in flight and waiting.

    `waiting_by` has what a caller may know of who waits: its own, and the others' as one.
    """

    workers: list[dict[str, Any]]
    slots: int = 0
    in_flight: int = 0
    waiting: int = 0
    waiting_of: dict[str, int] = field(default_factory=dict)
    waiting_by: list[Waiting] = field(default_factory=list)
    default: str = ""

    @property
    def alive(self) -> list[dict[str, Any]]:
        """The workers that live."""
        return [worker for worker in self.workers if worker["alive"]]

    def model_of(self, queue: str) -> str:
        """Return what a queue's requests ask for: by its name, else as its workers call it."""
        if queue.startswith(f"{self.default}."):
            return queue.removeprefix(f"{self.default}.")
        found = {one["model"] for one in self.alive if one["queue"] == queue}
        return ", ".join(sorted(found)[:3]) or "–"

    @property
    def oldest_s(self) -> float | None:
        """For how long the oldest batch that waits has been there; None if none does."""
        since = [one.since_ms for one in self.waiting_by if one.since_ms is not None]
        return max(0.0, time.time() - min(since) / 1000) if since else None


def shown_worker(worker: dict[str, Any], operator: bool) -> dict[str, Any]:
    """Return an announcement as the page shows it: a folder's last part, reasons for operators."""
    queue, model = str(worker["queue"]), str(worker.get("model") or "")
    alive = is_alive(worker)
    # A request that has its end and is not written yet may be one more than there are slots.
    slots, busy = int(worker.get("slots") or 0), int(worker.get("in_flight") or 0)
    return {
        "id": worker["id"],
        "alive": alive,
        "state": str(worker.get("state", "")) if alive else "silent",
        "silent_s": worker["silent_s"],
        "why": str(worker.get("why", "")) if operator else "",
        "queue": queue,
        "model": model.rstrip("/").rpartition("/")[2] or queue,
        "device": str(worker.get("device") or "–"),
        "buckets": [size for size in worker.get("buckets") or () if isinstance(size, int)],
        "version": str(worker.get("version") or "–"),
        "adapters": worker.get("adapters") or [],
        "slots": slots,
        "in_flight": busy,
        "running": min(slots, busy) if alive else 0,
        "deaths": int(worker.get("deaths") or 0),
        "returned": int((worker.get("done") or {}).get("handed_back") or 0),
        "older": protocol_of(worker) < PROTOCOL,
        "done": worker.get("done") or {},
        "mean_answer": worker.get("mean_answer"),
        "mean_prompt": worker.get("mean_prompt"),
        "slots_full": worker.get("slots_full"),
        "rates": worker.get("rates") or {},
        "kv_tokens": worker.get("kv_tokens"),
    }


def read_fleet(services: Services, caller: Caller, *, who: bool = False) -> Fleet:
    """Return the fleet as it is now; with `who` also who waits."""
    reads = WaitingReads.beside(services.batches)
    announced = reads.announcements()
    workers = [shown_worker(worker, caller.operator) for worker in announced]
    workers.sort(key=lambda worker: (not worker["alive"], worker["queue"], worker["id"]))
    fleet = Fleet(workers, default=services.settings.queue)
    queues = queues_of(workers, services.settings.queue)
    for worker in fleet.alive:
        fleet.slots += worker["slots"]
        fleet.in_flight += worker["in_flight"]
    fleet.waiting_of = reads.waiting_totals(queues)
    fleet.waiting = sum(fleet.waiting_of.values())
    if who:
        found = [one for queue in queues for one in reads.waiting_by(queue)]
        fleet.waiting_by = list(_for(caller, found))[:_SHOWN]
    return fleet


def queues_of(workers: Iterable[dict[str, Any]], default: str) -> list[str]:
    """Return the queues that are known of: the default one and those of workers."""
    return sorted({default, *(worker["queue"] for worker in workers)})


def _for(caller: Caller, found: list[Waiting]) -> Iterable[Waiting]:
    """Yield what waits; for who is no operator all others' as one line for a queue and priority."""
    others: dict[tuple[str, int], list[Waiting]] = {}
    for one in found:
        if caller.operator or one.tenant == caller.tenant:
            yield one
        else:
            others.setdefault((one.queue, one.priority), []).append(one)
    for (queue, priority), several in others.items():
        count = sum(one.requests for one in several)
        yield Waiting(queue, priority, "…", count, None, any(one.more for one in several))
