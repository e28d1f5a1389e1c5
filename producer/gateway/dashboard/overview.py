"""Overview: is it running, is it as fast as it could be, what waits; Workers; Tenants."""

from __future__ import annotations

from starlette.responses import Response

from producer.gateway.dashboard.batches import batch_rows
from producer.gateway.dashboard.fleet import read_fleet
from producer.gateway.dashboard.view import View

#: Workers in a page.
WORKERS = 100


def overview(view: View) -> Response:
    """Show the whole fleet on one page."""
    fleet = read_fleet(view.services, view.caller, who=True)
    rows, _ = batch_rows(view, "", 5)
    return view.page("overview.html", fleet=fleet, rows=rows, now_watched=watched(rows))


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
    return view.page("workers.html", fleet=fleet, shown=shown, page=page, more=more)
