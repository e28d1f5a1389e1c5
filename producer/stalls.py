"""Finds stalls: reasons why requests cannot run now, each with its remedy.

`producer doctor`, `producer status` and a gateway's page show the same stalls.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from contract import naming
from contract.batch import Batch
from contract.errors import RequestRejected, StoreForbidden
from contract.message import read_delivery
from contract.redis import keys
from contract.redis.announced_models import failure_of, has_loaded
from contract.redis.announcements import WAITS_FOR, is_alive, is_silent, model_name, queues_of
from contract.redis.deadlines import DeadlineReads, LateBatch
from contract.redis.reads import Reads
from contract.redis.tenants import Tenants
from contract.redis.waiting import WaitingList, WaitingReads
from contract.settings import Settings
from producer.lost_leases import LostLeaseReads, LostLeases
from producer.queue_workers import clock_text, left_text, served_names, worker_name
from producer.stall_texts import PASSING, SUBMITS_WAIT, TEXTS
from producer.start_command import start_command

#: Seconds without a new line after which the submit of an unsealed batch may have stopped.
STOPPED_S = 10.0
#: Seconds of silence for which a worker is perhaps only busy.
BUSY_S = 5.0
#: Seconds between two reads of a watched batch's leases.
LEASES_EVERY_S = 5.0

Worker = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Stall:
    """One reason why requests cannot run.

    `text` and `remedy` are templates with the keys of `facts` in braces, because the page
    translates the templates. `detail` is what the workers announce about the reason. A `passing`
    stall can end by itself, or is perhaps no stall.
    """

    code: str
    text: str
    remedy: str
    facts: dict[str, Any] = field(default_factory=dict)
    detail: str = ""
    passing: bool = False

    def sentence(self) -> str:
        """Return the reason in English."""
        text = self.text.format_map(self.facts)
        return f"{text} ({self.detail})" if self.detail else text

    def advice(self) -> str:
        """Return the remedy in English."""
        return self.remedy.format_map(self.facts)


def _stall(code: str, detail: str = "", text: str = "", **facts: Any) -> Stall:
    """Return a stall; `text` names its entry in TEXTS, if that is not its code."""
    return Stall(code, *TEXTS[text or code], facts, detail, code in PASSING)


def model_of(queue: str, default: str, workers: Iterable[Worker] = ()) -> str:
    """Return the model in a queue's name; without one, its workers' model, or the queue."""
    if queue.startswith(f"{default}."):
        return queue.removeprefix(f"{default}.")
    names = (model_name(one) for one in workers if one.get("queue") == queue)
    return next(filter(None, names), queue)


def _unserved(queue: str, default: str, gone: Iterable[Worker], facts: dict[str, Any]) -> Stall:
    """Return the stall of a queue without a worker; its remedy is the command that starts one."""
    text = "queue_unserved" if queue.startswith(f"{default}.") else "default_unserved"
    return Stall("queue_unserved", *TEXTS[text],
                 facts | {"command": start_command(queue, default, gone)})  # fmt: skip


def queue_stall(
    queue: str,
    default: str,
    waiting: int,
    workers: Sequence[Worker],
    alive: Sequence[Worker],
    gone: Iterable[Worker] = (),
) -> Stall | None:
    """Return the reason why none of a queue's requests can run; None if there is none.

    `default` is the default queue, `workers` are the living workers of the queue, and `alive` the
    living workers of all queues. `gone` are dead ones, which name the model that a new one loads.
    """
    model = model_of(queue, default, workers)
    facts: dict[str, Any] = {"queue": queue, "model": model, "waiting": waiting}
    if not workers:
        names = served_names(alive, default)[:8]
        detail = f"workers serve: {', '.join(names)}" if names else ""
        served = sorted({one for worker in alive for one in queues_of(worker)})
        # The output of `doctor --json` has these keys.
        facts |= {"in_flight": 0, "workers": 0, "others": list(served)}
        stall = _unserved(queue, default, gone, facts) if waiting else None
        return stall and replace(stall, detail=detail)
    failures = [failure_of(worker, queue) for worker in workers]
    if all(failures):
        return _stall("model_unloadable", _joined(failures), **facts)
    workers = [worker for worker, why in zip(workers, failures, strict=True) if not why]
    if silent := _silent_stall(workers, facts):
        return silent
    workers = [worker for worker in workers if not is_silent(worker)] or workers
    takers = [one for one in workers if has_loaded(one, queue) and one.get("state") != "draining"]
    if not takers and any(one.get("state") in ("ready", "swapping") for one in workers):
        return _stall("model_not_loaded", _loaded_text(workers), **facts) if waiting else None
    workers = takers or workers
    states = [str(worker.get("state", "")) for worker in workers]
    reasons = [str(worker.get("why") or "") for worker in workers]
    if set(states) - {"starting", "degraded", "draining"}:
        return None
    detail = _joined(reasons)
    waits = [WAITS_FOR in reason for reason in reasons]
    staying = [n for n, state in enumerate(states) if state != "draining"]
    if staying and all(waits[n] for n in staying):
        return _stall("servers_unreachable", detail, **facts)
    if not staying or "starting" in states:
        code = "workers_starting" if staying else "workers_draining"
        return _stall(code, detail, **facts) if waiting else None
    return _stall("workers_degraded", detail, **facts)


def silent_stall(worker: Worker, **facts: Any) -> Stall:
    """Return the stall of the requests of a worker whose next announcement did not come."""
    return _silent([worker], "worker_silent", worker=worker_name(worker), **facts)


def _silent(workers: Sequence[Worker], text: str, **facts: Any) -> Stall:
    least_s = min(one["silent_s"] for one in workers)
    stall = _stall("workers_silent", text=text, **facts, count=len(workers),
                   silent=clock_text(least_s), silent_s=round(least_s))  # fmt: skip
    return replace(stall, passing=least_s < BUSY_S)


def with_silence(stalls: Iterable[Stall], worker: Worker | None, settings: Settings) -> list[Stall]:
    """Return the stalls of a request, with that of its worker if this is silent."""
    found = list(stalls)
    if worker is None or not (is_alive(worker) and is_silent(worker)):
        return found
    if not any(one.code == "workers_silent" for one in found):
        queue = str(worker["queue"])
        model = model_of(queue, settings.queue, [worker])
        found.append(silent_stall(worker, queue=queue, model=model))
    return found


def _silent_stall(workers: Sequence[Worker], facts: Mapping[str, Any]) -> Stall | None:
    """Return the stall of a queue whose workers are all silent, except those that stop."""
    staying = [one for one in workers if one.get("state") != "draining"] or workers
    if not all(map(is_silent, staying)):
        return None
    if len(staying) == 1:
        return silent_stall(staying[0], **facts)
    return _silent(staying, "workers_silent", **facts)


def _loaded_text(workers: Iterable[Worker]) -> str:
    """Return a text with the models that workers have loaded, and the swaps that run."""
    names = sorted({model_name(one) for one in workers if one.get("state") == "ready"})
    swaps = _joined(str(one.get("why")) for one in workers if one.get("state") == "swapping")
    return _joined([f"loaded models: {', '.join(names)}" if names else "", swaps])


def _joined(reasons: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(filter(None, reasons)))


def memory_stall(used: int, limit: int, high_water: float) -> Stall | None:
    """Return a stall if Redis uses more bytes than submits may fill; limit 0 means no limit."""
    if not limit or used < limit * high_water:
        return None
    code = "memory_full" if used >= limit else "memory_high"
    facts: dict[str, Any] = {
        "used_bytes": used,
        "limit_bytes": limit,
        "percent": round(100 * used / limit),
    }
    return _stall(code, **facts)


def quiet_s(batch: Batch, now_ms: int) -> float:
    """Return the seconds since an unsealed batch got its last lines; 0 if that is unknown."""
    last_ms = batch.number("lines_at")
    return max(0.0, (now_ms - last_ms) / 1000) if last_ms and not batch.sealed else 0.0


def submit_stall(batch: Batch, now_ms: int) -> Stall | None:
    """Return a stall if the submit of a batch seems to have stopped before its end."""
    quiet = quiet_s(batch, now_ms)
    if quiet < STOPPED_S or ("cancelling" in batch.fields and not batch.stopped):
        return None
    facts: dict[str, Any] = {
        "batch": batch.id,
        "lines": batch.number("cursor"),
        "quiet": clock_text(quiet),
    }
    return _stall("submit_stopped", quiet_s=round(quiet), **facts)


def late_stall(batch: str, late: LateBatch) -> Stall:
    """Return the stall of a batch that no order of the batches lets meet its deadline."""
    late_s = max(1, round(late.late_s))
    facts: dict[str, Any] = {
        "batch": batch,
        "late_s": late_s,
        "slots": late.slots,
        "needed": late.needed,
    }
    text = "deadline_late" if late.needed else "deadline_lost"
    return _stall("deadline_late", text=text, **facts, late=clock_text(late_s))


def no_worker_stall(batches: int) -> Stall:
    """Return the stall of batches over HTTP, which get their queues from a worker."""
    return _stall("no_worker", count=batches)


def lease_stall(queue: str, lost: LostLeases) -> Stall:
    """Return the stall of requests that wait for the end of dead workers' leases."""
    left_s = max(0, round(lost.left_s))
    text = "lease_held" if lost.left_s > 0 else "lease_ends"
    if not lost.swept:  # a worker that starts waits one lease first (worker/lua/sweep.lua)
        text = "lease_unswept"
    facts: dict[str, Any] = {"queue": queue, "count": lost.requests, "left_s": left_s}
    return _stall("lease_held", ", ".join(sorted(lost.workers)[:3]), text, **facts,
                  left=left_text(lost.left_s))  # fmt: skip


class LeasesLost:
    """Counts every LEASES_EVERY_S the requests of a batch that wait for a dead worker's leases."""

    def __init__(self, store: Reads) -> None:
        self._reads = LostLeaseReads.using(store)
        self._read_at = -LEASES_EVERY_S
        self._text = ""

    def text(self, batch: Batch) -> str:
        """Return a clause about these requests; '' if there are none."""
        now = time.monotonic()
        if now - self._read_at >= LEASES_EVERY_S:
            lost = self._reads.lost_leases(batch)
            self._read_at = now
            self._text = "; ".join(lease_stall(*each).sentence() for each in lost.items())
        return self._text


class StallReads(LostLeaseReads, WaitingReads, Tenants):
    """Finds stalls in one Redis. Calls raise StoreUnavailable."""

    def stalls(
        self,
        settings: Settings,
        queues: Iterable[str],
        batches: Iterable[Batch],
        tenant: str | None = None,
        parts: Mapping[str, str] | None = None,
    ) -> list[Stall]:
        """Return the stalls of these queues and unfinished batches, in about five round trips.

        `parts` maps the queue's batches of which batches over HTTP consist to those. Messages of
        cancelled, ended and deleted batches do not count, because a worker drops them. With
        `tenant`, the caps of other tenants are left out.
        """
        names = sorted(set(queues))
        announced = self.announcements()
        alive = [worker for worker in announced if is_alive(worker)]
        waiting = Counter(self.waiting_totals(names))
        suspects = self._each("llen", [keys.suspects_list(queue) for queue in names])
        waiting.update(dict(zip(names, suspects, strict=True)))
        found: list[Stall | None] = self._memory_stalls(settings, waiting)
        for queue in names:
            workers = [worker for worker in alive if queue in queues_of(worker)]
            seen = (workers, alive, announced)
            stall = queue_stall(queue, settings.queue, waiting[queue], *seen)
            if stall and waiting[queue] and (dropped := self._count_dropped(queue)):
                left = waiting[queue] - dropped
                stall = queue_stall(queue, settings.queue, left, *seen)
            found.append(stall)
            found += self._caps(queue, model_of(queue, settings.queue, workers), workers, tenant)
        lost = self.lost_leases()
        found += [lease_stall(queue, lost[queue]) for queue in names if queue in lost]
        batches = list(batches)
        found += self.late_batches(names, {one.id: one.id for one in batches} | dict(parts or {}))
        unsealed = [batch for batch in batches if not (batch.sealed or batch.finished)]
        # While submits wait for Redis, a running submit looks like a stopped one.
        if unsealed and not any(one and one.code in SUBMITS_WAIT for one in found):
            now_ms = self.now_ms()
            found += [submit_stall(batch, now_ms) for batch in unsealed]
        return [one for one in found if one is not None]

    def late_batches(self, queues: Iterable[str], names: Mapping[str, str]) -> list[Stall]:
        """Return a stall for each of these batches that will miss its deadline.

        `names` maps the batches' ids in the queues to those that users know.
        """
        reads, latest = DeadlineReads.using(self), dict[str, LateBatch]()
        for late in (one for queue in queues for one in reads.deadline_order(queue).late):
            name = names.get(late.batch_id)
            if name is not None and (name not in latest or latest[name].late_s < late.late_s):
                latest[name] = late
        return [late_stall(name, late) for name, late in latest.items()]

    def _count_dropped(self, queue: str) -> int:
        """Return how many messages of cancelled, ended and deleted batches wait in a queue."""
        lists = [one for one in self.waiting_lists(queue) if one.batch_id]
        names = [keys.batch_key(one.batch_id) for one in lists]
        wanted = ["cancelling", "finished_at", "windows", "created_at"]
        found = list(zip(lists, self._each("hmget", names, wanted), strict=True))
        count = sum(one.requests for one, (*ends, _, _) in found if any(ends))
        # A list whose batch has no key is that of a deleted batch. The windows of a run share a
        # list with the run's name.
        unknown = [
            one for one, (*ends, windows, created) in found
            if not any(ends) and (windows or not created)
        ]  # fmt: skip
        return count + sum(one.requests for one in unknown if self._has_only_ended(queue, one))

    def _has_only_ended(self, queue: str, one: WaitingList) -> bool:
        """Return whether the oldest and the newest message of a list are of ended batches."""
        key = naming.turn_list(queue, one.step, one.tenant, one.batch_id)
        pipe = self._client.pipeline(transaction=False)
        ends = [raw for raw in pipe.lindex(key, 0).lindex(key, -1).execute() if raw]
        try:
            found = [read_delivery("", raw) for raw in ends]
        except RequestRejected:  # it becomes a dead letter when a worker takes it
            return False
        names = [keys.batch_key(one.batch) for one in found]
        fields = self._each("hmget", names, ["life", "cancelling", "finished_at"])
        return all(
            (life or b"").decode() != one.life or any(ends)
            for one, (life, *ends) in zip(found, fields, strict=True)
        )

    def _memory_stalls(self, settings: Settings, waiting: Mapping[str, int]) -> list[Stall | None]:
        try:
            memory = self._client.info("memory")
        except StoreForbidden:  # only `producer doctor` needs a user that may call INFO
            return []
        limit = int(memory.get("maxmemory", 0))
        if limit:
            return [memory_stall(int(memory["used_memory"]), limit, settings.high_water)]
        most = settings.high_water_requests
        return [_stall("queue_full", queue=q, waiting=n) for q, n in waiting.items() if n >= most]

    def _caps(
        self, queue: str, model: str, workers: Sequence[Worker], tenant: str | None
    ) -> list[Stall | None]:
        """Return a stall for each tenant whose requests wait for its cap while slots are free."""
        raws = self._client.smembers(f"{naming.turns_key(queue)}:capped")
        # Each entry is <priority>\x06<tenant>.
        names = {raw.decode().partition("\x06")[2] for raw in raws}
        names = names if tenant is None else names & {tenant}
        slots = sum(n for one in workers if isinstance(n := one.get("slots"), int))
        if not names or sum(self.in_flight_by(queue).values()) >= slots:
            return []
        waits = Counter[str]()
        for one in self.waiting_by(queue):
            waits[one.tenant] += one.requests
        return [
            _stall("tenant_capped", queue=queue, model=model, tenant=name, waiting=waits[name],
                   cap=self.tenant(name).max_in_flight)
            for name in sorted(names)
            if waits[name]
        ]  # fmt: skip
