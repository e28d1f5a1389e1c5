"""Overview: is it running, is it as fast as it could be, what waits; Workers; Tenants."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from contract.redis.ring import RingReads
from contract.redis.tenants import Tenants
from contract.redis.waiting import WaitingReads
from gateway.page.batches import batch_rows
from gateway.page.charts import filled, rates
from gateway.page.fleet import queues_of, read_fleet
from gateway.page.view import View

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
    minutes = RingReads.beside(view.services.batches).day(
        queues_of(fleet.workers, view.services.settings.queue)
    )
    return view.page(
        "overview.html",
        fleet=fleet,
        rows=rows,
        now_watched=watched(rows),
        tokens=rates(minutes),
        fill=filled(minutes[-60:]),
        day=any(minute.slots_s for minute in minutes),
    )


def watched(rows: list[dict[str, object]]) -> str:
    """Return the ids of batches that may still change, for the live stream."""
    return ",".join(str(row["id"]) for row in rows if not row["ended"])


def workers(view: View) -> Response:
    """Show a page of workers."""
    fleet = read_fleet(view.services, view.caller)
    number = view.query.get("page", "1")
    page = int(number) if number.isdecimal() and len(number) < 6 else 1
    first = max(0, page - 1) * WORKERS
    more = len(fleet.workers) > first + WORKERS
    shown = fleet.workers[first : first + WORKERS]
    hours = RingReads.beside(view.services.batches).hours([worker["id"] for worker in shown])
    fills = {name: filled(minutes) for name, minutes in hours.items()}
    return view.page("workers.html", fleet=fleet, shown=shown, fills=fills, page=page, more=more)


def tenants(view: View) -> Response:
    """Show what each tenant has of the fleet beside its weight; the others' as one to most."""
    services, caller = view.services, view.caller
    reads = Tenants.beside(services.batches)
    terms = {tenant.name: tenant for tenant in reads.tenants()}
    waits = WaitingReads.beside(services.batches)
    loads: dict[str, list[int]] = {caller.tenant: [0, 0]}
    queues = queues_of(reads.announcements(), services.settings.queue)
    for queue in queues:
        for one in waits.waiting_by(queue):
            loads.setdefault(one.tenant or CELERY, [0, 0])[0] += one.requests
        for name, count in reads.in_flight_by(queue).items():
            loads.setdefault(name, [0, 0])[1] += count
    loads |= {name: [0, 0] for name in terms if name not in loads}
    used = reads.used(queues)
    loads |= {name: [0, 0] for name in used if name not in loads}
    weights = {name: terms[name].weight if name in terms else 1.0 for name in loads}
    active = {name for name, (waiting, running) in loads.items() if waiting or running}
    of_weight = sum(weights[name] for name in active)
    of_used = sum(used.values())
    of_running = sum(running for _, running in loads.values())
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
