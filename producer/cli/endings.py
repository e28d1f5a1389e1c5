"""What commands say at their end."""

from __future__ import annotations

from contract.batch import Batch
from producer.cli import show
from producer.cli.context import ALL_WELL, SOME_FAILED
from producer.cli.progress import tell

WATCH_AGAIN = "the batch goes on; `producer watch {}` follows it again"


def ended(batch: Batch) -> int:
    """Tell how a batch ended; return the exit status for it."""
    counts = batch.as_json()["request_counts"]
    told = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    tell(f"{batch.id}: {batch.status}, {told or 'no requests'}")
    return ALL_WELL if counts["completed"] == counts["total"] else SOME_FAILED


def changed(batch_id: str, what: str, count: int, *, as_json: bool) -> int:
    """Tell how many requests of a batch a command has changed; return the exit status."""
    tell(f"{batch_id}: {count} requests {what}")
    if as_json:
        show.put_json({"id": batch_id, "requests": count})
    return ALL_WELL
