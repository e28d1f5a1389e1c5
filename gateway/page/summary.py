"""Sums up the caller's batches: the sentence on the overview, and what stalls them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from contract.redis.announcements import is_alive
from gateway.page.view import View
from producer.stall_texts import TEXTS
from producer.stalls import Stall, StallReads, no_worker_stall

Row = Mapping[str, Any]

#: Seconds for which failures are counted, and most error codes in the sentence.
_DAY_S, _CODES = 86_400, 3
#: Name of a clause of the sentence -> its text for one and for several.
CLAUSES = {
    "none": ("No batch runs.", "No batch runs."),
    "runs": ("1 batch runs.", "{n} batches run."),
    "runs_until": (
        "1 batch runs, done about {at}.", "{n} batches run, the last one done about {at}."
    ),
    "waits": ("1 batch waits: {model} has no worker that is ready.",
              "{n} batches wait: {model} has no worker that is ready."),
    "waits_first": ("1 batch waits for a worker.", "{n} batches wait for a worker."),
    "waits_for_run": (
        "1 run has done what it has queued. If its command has ended, the same command goes on.",
        "{n} runs have done what they have queued. If their commands have ended, the same commands "
        "go on.",
    ),
    "failed": ("1 line failed in the last 24 hours: {codes}.",
               "{n} lines failed in the last 24 hours: {codes}."),
}  # fmt: skip
#: Codes of the stalls that stop all requests of a queue.
_OF_QUEUES = {name for name, (text, _) in TEXTS.items() if "{queue}" in text} - {
    "tenant_capped", "queue_full", "lease_held", "lease_ends", "lease_unswept",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Clause:
    """One clause of the sentence: a text of CLAUSES, and its fields."""

    text: str
    fields: dict[str, Any] = field(default_factory=dict)


def stalls_of(view: View, rows: Iterable[Row], queues: Iterable[str] = ()) -> list[Stall]:
    """Return what stalls these batches and queues; workers' reasons are for operators only."""
    caller, settings = view.caller, view.services.settings
    unfinished = [row for row in rows if not row["ended"]]
    names = {queue for row in unfinished for queue in row["queues"]} | set(queues)
    new = [row for row in unfinished if row["status"] == "validating" and not row["queues"]]
    if not names and not new:
        return []
    submitted = [row["submitted"] for row in unfinished if row["submitted"] is not None]
    parts = {part: row["id"] for row in unfinished for part in row["parts"]}
    tenant = None if caller.operator else caller.tenant
    reads = StallReads.using(view.services.batches)
    stalls = reads.stalls(settings, names, submitted, tenant, parts)
    if new and not any(map(is_alive, reads.announcements())):
        stalls.append(no_worker_stall(len(new)))
    return stalls if caller.operator else [replace(one, detail="") for one in stalls]


def summary(rows: Sequence[Row], stalls: Sequence[Stall], now: float) -> list[Clause]:
    """Return the sentence about these batches; `now` is in seconds since 1970."""
    if not rows:
        return []
    facts = [one.facts for one in stalls if one.code in _OF_QUEUES]
    named = {one["queue"]: one["model"] for one in facts}
    models = {
        queue: f"queue {queue}" if queue == model else model for queue, model in named.items()
    }
    stopped = {one.facts["batch"] for one in stalls if one.code == "submit_stopped"}
    unserved = any(one.code == "no_worker" for one in stalls)
    waits, left, first, done = Counter[str](), [], 0, 0
    for row in rows:
        if row["ended"]:
            continue
        if row["waits_for_run"]:
            done += 1
        elif unserved and not row["queues"]:
            first += 1
        elif row["queues"] and all(queue in models for queue in row["queues"]):
            waits[models[row["queues"][0]]] += 1
        elif row["id"] not in stopped or row["done"] < row["total"]:
            left.append(row["left_s"])
    clauses = [_runs(left, now)] if left or not (waits or first) else []
    clauses += [_clause("waits_first", first)] if first else []
    clauses += [_clause("waits", count, model=model) for model, count in waits.most_common()]
    clauses += [_clause("waits_for_run", done)] if done else []
    return clauses + _failed(rows, now)


def _runs(left: Sequence[float | None], now: float) -> Clause:
    known_s = [one for one in left if one is not None]
    if known_s and len(known_s) == len(left):
        return _clause("runs_until", len(left), at=now + max(known_s))
    return _clause("runs" if left else "none", len(left))


def _failed(rows: Iterable[Row], now: float) -> list[Clause]:
    codes = Counter[str]()
    for row in rows:
        if (row["ended_at"] or now) >= now - _DAY_S:
            codes.update(dict(row["failures"]))
    if not codes:
        return []
    named = [f"{count:,} {code or '?'}" for code, count in codes.most_common(_CODES)]
    if (rest := codes.total() - sum(count for _, count in codes.most_common(_CODES))) > 0:
        named.append(f"{rest:,} …")
    return [_clause("failed", codes.total(), codes=", ".join(named))]


def _clause(name: str, count: int, **fields: Any) -> Clause:
    one, several = CLAUSES[name]
    return Clause(one if count == 1 else several, {"n": f"{count:,}"} | fields)
