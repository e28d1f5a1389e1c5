"""The fleet as the page shows it, as much of it as a caller may see. Overview: is it running, is it
as fast as it could be, what waits; Workers; Tenants."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response

from contract.redis.announcements import is_alive, protocol_of
from contract.redis.history import HistoryReads, Minute
from contract.redis.tenants import Tenants
from contract.redis.waiting import Waiting, WaitingReads
from contract.version import PROTOCOL
from gateway.http.caller import Caller
from gateway.http.services import Services
from gateway.page.batches import batch_rows, watched
from gateway.page.view import View

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
        "kv_tokens": worker.get("kv_tokens"),
    }


def read_fleet(services: Services, caller: Caller, *, who: bool = False) -> Fleet:
    """Return the fleet as it is now; with `who` also who waits."""
    reads = WaitingReads.using(services.batches)
    announced = reads.announcements()
    workers = [shown_worker(worker, caller.operator) for worker in announced]
    workers.sort(key=lambda worker: (not worker["alive"], worker["queue"], worker["id"]))
    fleet = Fleet(workers, default=services.settings.queue)
    queues = queues_of(workers, services.settings.queue)
    for worker in fleet.alive:
        fleet.slots += worker["slots"]
        fleet.in_flight += worker["in_flight"]
    fleet.waiting = sum(reads.waiting_totals(queues).values())
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


#: Points of a line: a page stays small, and a screen shows no more.
POINTS = 144
WIDTH, HEIGHT = 720, 100


@dataclass(frozen=True, slots=True)
class Chart:
    """A line over time and the area under it, as SVG paths: numbers only, so that a page needs
    neither style nor script. What its texts say: largest and mean value."""

    line: str
    area: str
    most: float
    mean: float
    from_s: int
    to_s: int


def _chart(values: Sequence[float], minutes: Sequence[Minute], top: float | None = None) -> Chart:
    step = max(1, len(values) // POINTS)
    groups = [values[at : at + step] for at in range(0, len(values), step)]
    points = [sum(group) / len(group) for group in groups]
    most = max(points, default=0.0)
    scale = HEIGHT / ((top or most) or 1)
    width = WIDTH / max(1, len(points) - 1)
    places = [f"{n * width:.1f},{HEIGHT - value * scale:.1f}" for n, value in enumerate(points)]
    line = "M" + "L".join(places)
    mean = sum(values) / len(values) if values else 0.0
    return Chart(
        line, f"{line}L{WIDTH},{HEIGHT}L0,{HEIGHT}Z", most, mean,
        minutes[0].minute * 60, minutes[-1].minute * 60,
    )  # fmt: skip


def rate_chart(minutes: Sequence[Minute]) -> Chart:
    """Return the tokens written a second, since there were slots, but of an hour at least; without
    the minute that has just begun."""
    began = next((n for n, minute in enumerate(minutes) if minute.slots_s), 0)
    whole = minutes[max(0, min(began, len(minutes) - 61)) : -1] or minutes
    return _chart([minute.completion_tokens / 60 for minute in whole], whole)


def fill_chart(minutes: Sequence[Minute]) -> Chart:
    """Return the share of slots in use, from 0 to 1; 0 where there was no slot."""
    return _chart([minute.fill or 0.0 for minute in minutes], minutes, top=1.0)


#: Workers in a page.
WORKERS = 100
#: Whose the requests of plain Celery clients are (contract/lua/turns.lua).
CELERY = "celery"
#: Tenants that are shown.
MOST_TENANTS = 500


def overview(view: View) -> Response:
    """Show the whole fleet on one page."""
    fleet = read_fleet(view.services, view.caller, who=True)
    rows, _ = batch_rows(view, "", 5)
    minutes = HistoryReads.using(view.services.batches).day(
        queues_of(fleet.workers, view.services.settings.queue)
    )
    return view.page(
        "overview.html",
        fleet=fleet,
        rows=rows,
        now_watched=watched(rows),
        tokens=rate_chart(minutes),
        fill=fill_chart(minutes[-60:]),
        day=any(minute.slots_s for minute in minutes),
    )


def workers(view: View) -> Response:
    """Show a page of workers."""
    fleet = read_fleet(view.services, view.caller)
    number = view.query.get("page", "1")
    page = int(number) if number.isdecimal() and len(number) < 6 else 1
    first = max(0, page - 1) * WORKERS
    more = len(fleet.workers) > first + WORKERS
    shown = fleet.workers[first : first + WORKERS]
    hours = HistoryReads.using(view.services.batches).hours([worker["id"] for worker in shown])
    fills = {name: fill_chart(minutes) for name, minutes in hours.items()}
    return view.page("workers.html", fleet=fleet, shown=shown, fills=fills, page=page, more=more)


def tenants(view: View) -> Response:
    """Show what each tenant has of the fleet beside its weight; the others' as one to most."""
    services, caller = view.services, view.caller
    reads = Tenants.using(services.batches)
    terms = {tenant.name: tenant for tenant in reads.tenants()}
    waits = WaitingReads.using(services.batches)
    loads: dict[str, list[int]] = {caller.tenant: [0, 0]}
    queues = queues_of(reads.announcements(), services.settings.queue)
    for queue in queues:
        for one in waits.waiting_by(queue):
            loads.setdefault(one.tenant or CELERY, [0, 0])[0] += one.requests
        for name, count in reads.in_flight_by(queue).items():
            loads.setdefault(name, [0, 0])[1] += count
    used = reads.used(queues)
    loads |= {name: [0, 0] for name in (*terms, *used) if name not in loads}
    weights = {name: terms[name].weight if name in terms else 1.0 for name in loads}
    active = {name for name, (waiting, running) in loads.items() if waiting or running}
    of_weight = sum(weights[name] for name in active)
    of_used, of_running = sum(used.values()), sum(running for _, running in loads.values())
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "waiting": waiting,
            "running": running,
            "weight": weights[name],
            "cap": terms[name].max_in_flight if name in terms else None,
            "share": running / of_running if of_running else None,
            "tokens": round(used.get(name, 0)),
            "of_tokens": used.get(name, 0) / of_used if of_used else None,
            "due": weights[name] / of_weight if name in active else None,
        }
        for name, (waiting, running) in sorted(loads.items())
        if caller.operator or name == caller.tenant
    ]
    others = len(loads) - len(rows)
    chosen = view.query.get("tenant", "")[:200]
    if chosen:
        rows = [row for row in rows if row["name"] == chosen]
    return view.page(
        "tenants.html", rows=rows[:MOST_TENANTS], others=others, chosen=chosen,
        known=sorted(loads)[:MOST_TENANTS] if caller.operator else [],
    )  # fmt: skip
