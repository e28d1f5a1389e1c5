"""Joins the record of a run in Redis with the run's windows, so that it reads as one batch.

A window is a part of the run's file, submitted as a batch. The record has the counts of the windows
that the run has collected and deleted.
"""

from collections.abc import Sequence

from contract.batch import Batch
from contract.failures import failures_of
from contract.results import OUTCOMES

#: Counters of a run that are the sums of its windows' counters.
COUNTS = (
    "total", "valid", *OUTCOMES, "prompt_tokens", "completion_tokens", "cut", "retried",
    "identical", "cached",
)  # fmt: skip


def joined(record: Batch, windows: Sequence[Batch]) -> Batch:
    """Return a run: its record, with the windows that the record does not count yet."""
    parts, fields = (record, *windows), dict(record.fields)
    for name in COUNTS:
        fields[name] = str(sum(part.number(name) for part in parts))
    fields["cursor"] = str(max(part.number("cursor") for part in parts))
    codes = [one for one in failures_of(parts) if one.code]
    fields["failures"] = "\n".join(" ".join((c.code, str(c.count), *c.first)) for c in codes)
    queues = (record.fields.get("queues", "").split("\n"), *(one.queues for one in windows))
    fields["queues"] = "\n".join(dict.fromkeys(q for several in queues for q in several if q))
    if "identical" not in record.fields:  # without --dedupe
        del fields["identical"]
    for window in windows:
        if not window.finished:
            fields.pop("finished_at", None)
        if window.stopped:
            fields["reason"] = window.fields["reason"]
    fields |= _stop_of(record, windows)
    return Batch(record.id, fields, record.reconnects, tuple(windows))


def no_request_text(run: Batch, custom_id: str) -> str:
    """Return a text about a request that is in none of a run's windows in Redis."""
    if run.complete:
        return (
            f"no request {custom_id!r} is in Redis: run {run.id} has ended, and the results of all "
            "its lines are in OUT or ERR"
        )
    return (
        f"no request {custom_id!r} is queued now: run {run.id} has no such line, has not queued it "
        "yet, or has written its result (to OUT or ERR; until the end to OUT.lines, if OUT is a "
        "table or in a bucket)"
    )


def _stop_of(record: Batch, windows: Sequence[Batch]) -> dict[str, str]:
    """Return the fields that a stopped batch has, if failures stopped the run; else {}.

    They are not in the record itself: a `run` that goes on would be one that a user has cancelled.
    """
    stopped_at = record.fields.get("stopped_at", "")
    if not (stopped_at and record.fields.get("reason")) or "cancelling" in record.fields:
        return {}
    stop = {"cancelling": "1", "stopped": "sealed", "reason": record.fields["reason"]}
    if all(window.finished for window in windows):
        ends = (int(stopped_at), *(window.number("finished_at") for window in windows))
        stop["finished_at"] = str(max(ends))
    return stop
