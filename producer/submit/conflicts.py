"""What a submit may find in Redis instead of what it expects."""

from contract.errors import BatchConflict
from contract.redis.batches import Enqueued
from producer.same_batch import BatchChanged, WritesLost


def differs(batch_id: str, where: str) -> BatchConflict:
    """Return the error for a batch that another file has made."""
    return BatchConflict(
        f"batch {batch_id} was submitted from a different file: {where}", remedy="new_batch_id"
    )


def closed(batch_id: str, before: str) -> BatchConflict:
    """Return the error for a batch that takes no more lines."""
    return BatchConflict(
        f"batch {batch_id} was closed before {before} (cancelled, or submitted from a shorter "
        "file)",
        remedy="new_batch_id",
    )


def deleted(batch_id: str) -> BatchChanged:
    """Return the error for a batch that is gone."""
    return BatchChanged(
        f"batch {batch_id} was deleted while it was submitted, or Redis has lost it",
        remedy="submit_from_start",
        batch_id=batch_id,
    )


def lost(batch_id: str, answer: Enqueued) -> WritesLost:
    """Return the error for a batch of which Redis has less than it had confirmed."""
    kept = "the lines up to" if answer.answer == "moved" else "so many requests queued:"
    return WritesLost(batch_id, f"of batch {batch_id} it has {kept} {answer.cursor} only")
