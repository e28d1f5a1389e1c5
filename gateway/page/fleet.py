"""Pages of the overview, workers and tenants, with the data that a caller may see."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response

from contract.redis.announced_models import sleep_failed, swaps_of, unloadable
from contract.redis.announced_servers import shared_servers
from contract.redis.announcements import is_alive, model_name, protocol_of, queues_of
from contract.redis.history import HistoryReads, Minute
from contract.redis.tenants import Tenants
from contract.redis.waiting import Waiting, WaitingReads
from contract.version import PROTOCOL
from gateway.http.caller import Caller
from gateway.http.services import Services
from gateway.page.batches import add_names_and_estimates, newest_rows, watched
from gateway.page.summary import stalls_of, summary
from gateway.page.view import View
from gateway.redis.machines import MachineReads
from producer.model_states import model_states
from producer.stalls import model_of
from producer.start_command import start_command

#: Most rows of waiting requests, most workers on a page, and most tenants that are shown.
MAX_WAITING, MAX_WORKERS, MAX_TENANTS = 200, 100, 500
#: Number of newest batches that the summary counts, and that the overview lists.
MAX_SUMMED, MAX_LATEST = 100, 5
#: The tenant that is shown for requests of plain Celery clients (contract/lua/turns.lua).
CELERY = "celery"


@dataclass(slots=True)
class Fleet:
    """All workers, living ones first, and the number of waiting requests.

    `waiting_by` has the waiting requests by queue, priority and tenant; a caller who is not an
    operator sees other tenants as one. `start` is the command that starts a worker of a queue in
    which requests wait, or else of the queue of the worker that was seen last.
    """

    workers: list[dict[str, Any]]
    default_queue: str
    waiting: int
    start: str = ""
    waiting_by: list[Waiting] = field(default_factory=list)

    @property
    def alive(self) -> list[dict[str, Any]]:
        """The workers that are alive."""
        return [worker for worker in self.workers if worker["alive"]]

    @property
    def seen(self) -> list[dict[str, Any]]:
        """The living workers whose next announcement is not overdue."""
        return [worker for worker in self.alive if worker["seen_s"] is None]

    @property
    def slots(self) -> int:
        """Slots of all workers that were seen lately."""
        return sum(worker["slots"] for worker in self.seen)

    @property
    def running(self) -> int:
        """Slots in use of these workers; requests in flight beyond the slots wait."""
        return sum(worker["running"] for worker in self.seen)

    def model_of(self, queue: str) -> str:
        """Return the model of a queue, from the queue's name or else from its workers."""
        if queue.startswith(f"{self.default_queue}."):
            return queue.removeprefix(f"{self.default_queue}.")
        models = {one["model"] for one in self.alive if one["queue"] == queue}
        return ", ".join(sorted(models)[:3]) or "–"

    @property
    def oldest_s(self) -> float | None:
        """Age of the oldest batch that waits; None if none does."""
        since = [one.since_ms for one in self.waiting_by if one.since_ms is not None]
        return max(0.0, time.time() - min(since) / 1000) if since else None


def _worker(worker: dict[str, Any], operator: bool, default_queue: str) -> dict[str, Any]:
    """Return a worker's announced state for the page; only operators see reasons and servers."""
    queue = str(worker["queue"])
    alive = is_alive(worker)
    silent = not alive or bool(worker.get("overdue"))
    # `in_flight` may exceed `slots`: a request that has ended may not be committed yet.
    slots, in_flight = int(worker.get("slots") or 0), int(worker.get("in_flight") or 0)
    done = worker.get("done") or {}
    optional = ("mean_answer", "mean_prompt", "slots_full", "kv_tokens")
    return {
        "id": worker["id"],
        "alive": alive,
        "state": "silent" if silent else str(worker.get("state", "")),
        "seen_s": worker["silent_s"] if silent else None,
        "why": str(worker.get("why", "")) if operator else "",
        "queue": queue,
        "model": model_name(worker) or model_of(queue, default_queue),
        "device": str(worker.get("device") or "–"),
        "buckets": [size for size in worker.get("buckets") or () if isinstance(size, int)],
        "version": str(worker.get("version") or "–"),
        "adapters": worker.get("adapters") or [],
        "queues": queues_of(worker),
        "models": model_states([worker], {}),
        "swaps": swaps_of(worker)[::-1],
        "failures": unloadable(worker) if operator else {},
        "sleep_failed": sleep_failed(worker) if operator else {},
        "servers": shared_servers([worker]) if operator else [],
        "slots": slots,
        "in_flight": in_flight,
        "running": 0 if silent else min(slots, in_flight),
        "deaths": int(worker.get("deaths") or 0),
        "returned": int(done.get("handed_back") or 0),
        "older": protocol_of(worker) < PROTOCOL,
        "done": done,
        **{name: worker.get(name) for name in optional},
    }


def read_fleet(
    services: Services, caller: Caller, more_queues: Iterable[str] = (), *, by_tenant: bool = False
) -> Fleet:
    """Read the workers and the number of waiting requests, also by tenant if `by_tenant`.

    `more_queues` are queues of batches, which may have no worker.
    """
    reads = WaitingReads.using(services.batches)
    default = services.settings.queue
    announced = sorted(reads.announcements(), key=lambda worker: float(worker["silent_s"]))
    workers = [_worker(worker, caller.operator, default) for worker in announced]
    workers.sort(key=lambda worker: (not worker["alive"], worker["queue"], worker["id"]))
    queues = sorted({*_known_queues((one["queues"] for one in workers), default), *more_queues})
    waiting_by = [one for queue in queues for one in reads.waiting_by(queue)] if by_tenant else []
    totals = reads.waiting_totals(queues)
    asked = [queue for queue in queues if totals[queue]]
    queue = next(iter([*asked, *(str(one["queue"]) for one in announced)]), default)
    return Fleet(
        workers, default, sum(totals.values()),
        start_command(queue, default, announced, unknown="…"),
        list(_visible(caller, waiting_by))[:MAX_WAITING],
    )  # fmt: skip


def _known_queues(queues: Iterable[Iterable[str]], default: str) -> list[str]:
    """Return the known queues: the default one and those of workers."""
    return sorted({default, *(queue for several in queues for queue in several)})


def _visible(caller: Caller, waiting: list[Waiting]) -> Iterable[Waiting]:
    """Yield waiting requests; unless an operator calls, those of other tenants are added up."""
    hidden: dict[tuple[str, int], list[Waiting]] = {}
    for one in waiting:
        if caller.operator or one.tenant == caller.tenant:
            yield one
        else:
            hidden.setdefault((one.queue, one.priority), []).append(one)
    for (queue, priority), several in hidden.items():
        count = sum(one.requests for one in several)
        yield Waiting(queue, priority, "…", count, None, any(one.more for one in several))


#: Most points of a chart: no screen shows more, and a page stays small.
POINTS = 144
WIDTH, HEIGHT = 720, 100


@dataclass(frozen=True, slots=True)
class Chart:
    """A line over time and the area under it, as SVG paths; times are seconds since 1970."""

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
    line = "M" + "L".join(
        f"{n * width:.1f},{HEIGHT - value * scale:.1f}" for n, value in enumerate(points)
    )
    mean = sum(values) / len(values) if values else 0.0
    area = f"{line}L{WIDTH},{HEIGHT}L0,{HEIGHT}Z"
    return Chart(line, area, most, mean, minutes[0].minute * 60, minutes[-1].minute * 60)


def rate_chart(minutes: Sequence[Minute]) -> Chart:
    """Return the chart of tokens written per second, without the current minute.

    It begins with the first minute that had slots, and shows at least the last hour.
    """
    began = next((n for n, minute in enumerate(minutes) if minute.slots_s), 0)
    whole = minutes[max(0, min(began, len(minutes) - 61)) : -1] or minutes
    return _chart([minute.completion_tokens / 60 for minute in whole], whole)


def fill_chart(minutes: Sequence[Minute]) -> Chart:
    """Return the chart of the share of used slots (0 to 1; 0 without slots)."""
    return _chart([minute.fill or 0.0 for minute in minutes], minutes, top=1.0)


def overview(view: View) -> Response:
    """Show the overview: a summary, workers, waiting requests, charts and the latest batches."""
    rows = newest_rows(view, MAX_SUMMED)
    open_queues = {queue for row in rows if not row["ended"] for queue in row["queues"]}
    fleet = read_fleet(view.services, view.caller, open_queues, by_tenant=True)
    latest = rows[:MAX_LATEST]
    running = [row for row in rows[MAX_LATEST:] if not row["ended"]]
    add_names_and_estimates(view.services, [*latest, *running])
    queues = _known_queues((one["queues"] for one in fleet.workers), fleet.default_queue)
    stalls = stalls_of(view, rows, queues)
    minutes = HistoryReads.using(view.services.batches).day(queues)
    return view.page(
        "overview.html",
        fleet=fleet,
        rows=latest,
        stalls=stalls,
        summary=summary(rows, stalls, time.time()),
        watched=watched(latest),
        rates=rates_of(minutes if fleet.alive else []),
        tokens=rate_chart(minutes),
        fill=fill_chart(minutes[-60:]),
        day=any(minute.slots_s for minute in minutes),
    )


def workers(view: View) -> Response:
    """Show a page of workers."""
    fleet = read_fleet(view.services, view.caller)
    number = view.query.get("page", "1")
    page = int(number) if number.isdecimal() and len(number) < 6 else 1
    first = max(0, page - 1) * MAX_WORKERS
    more = len(fleet.workers) > first + MAX_WORKERS
    shown = fleet.workers[first : first + MAX_WORKERS]
    hours = HistoryReads.using(view.services.batches).hours([worker["id"] for worker in shown])
    fills = {name: fill_chart(minutes) for name, minutes in hours.items()}
    rates = {name: rates_of(minutes)["out_s"] for name, minutes in hours.items()}
    machines = MachineReads.using(view.services.batches).reports([worker["id"] for worker in shown])
    if not view.caller.operator:
        machines = {name: report | {"log": []} for name, report in machines.items()}
    return view.page(
        "workers.html", shown=shown, fills=fills, rates=rates, machines=machines, page=page,
        more=more, start=fleet.start,
    )  # fmt: skip


def rates_of(minutes: Sequence[Minute]) -> dict[str, float | None]:
    """Return the last whole minute's rates as in live.py (`_s`: per second); None without slots."""
    last = minutes[-2] if len(minutes) > 1 else None
    if last is None or not last.slots_s:
        return dict.fromkeys(("out_s", "in_s", "requests_s", "cached"))
    read = last.prompt_tokens
    return {
        "out_s": last.completion_tokens / 60,
        "in_s": read / 60,
        "requests_s": (last.completed + last.other) / 60,
        "cached": min(1.0, last.cached_tokens / read) if read else None,
    }


def tenants(view: View) -> Response:
    """Show tenants' requests, tokens and weights; only operators see other tenants."""
    services, caller = view.services, view.caller
    reads = Tenants.using(services.batches)
    waits = WaitingReads.using(services.batches)
    terms = {tenant.name: tenant for tenant in reads.tenants()}
    queues = _known_queues(map(queues_of, reads.announcements()), services.settings.queue)
    used = reads.used(queues)
    waiting, running = Counter[str](), Counter[str]()
    for queue in queues:
        for one in waits.waiting_by(queue):
            waiting[one.tenant or CELERY] += one.requests
        running.update(reads.in_flight_by(queue))
    names = {caller.tenant, *waiting, *running, *terms, *used}
    weights = {name: terms[name].weight if name in terms else 1.0 for name in names}
    active = {name for name in names if waiting[name] or running[name]}
    active_weight, all_tokens = sum(weights[name] for name in active), sum(used.values())
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "waiting": waiting[name],
            "running": running[name],
            "weight": weights[name],
            "cap": terms[name].max_in_flight if name in terms else None,
            "share": running[name] / running.total() if running.total() else None,
            "tokens": round(used.get(name, 0)),
            "share_of_tokens": used.get(name, 0) / all_tokens if all_tokens else None,
            "share_by_weight": weights[name] / active_weight if name in active else None,
        }
        for name in sorted(names)
        if caller.operator or name == caller.tenant
    ]
    hidden = len(names) - len(rows)
    chosen = view.query.get("tenant", "")[:200]
    return view.page(
        "tenants.html",
        rows=[row for row in rows if chosen in ("", row["name"])][:MAX_TENANTS],
        hidden=hidden,
        chosen=chosen,
        known=sorted(names)[:MAX_TENANTS] if caller.operator else [],
    )
