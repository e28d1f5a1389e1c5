"""One batch that is looked at again and again: it must stay the one that it was at first."""

from __future__ import annotations

import time

from contract.batch import Batch
from contract.errors import WarmqError
from contract.redis.batches import BatchStore

#: Redis takes a batch's keys one after the other when their time is over: within so many seconds.
_EXPIRY_TAKES_S = 1.0


class BatchChanged(WarmqError):
    """A batch was deleted, replaced, retried or set back while somebody read or followed it.

    `happened` says what, without the remedy that the message has.
    """

    code = "batch_changed"

    def __init__(self, happened: str, remedy: str) -> None:
        super().__init__(f"{happened}; {remedy}")
        self.happened = happened


class WritesLost(BatchChanged):
    """Redis does not have any more what it had confirmed, as after a failover."""

    def __init__(self, batch_id: str, what: str, remedy: str = "") -> None:
        super().__init__(
            f"Redis has lost its last writes (a failover?): {what}",
            remedy
            or f"the same `producer submit` with --batch-id {batch_id} goes on where it stopped",
        )


class SameBatch:
    """A batch as the caller has found it, and what has become of it since.

    Args:
        store: where it is.
        batch: as it was found.
        doing: what is done meanwhile, for messages: "its results were read".
        may_reopen: whether it may be open again after it was sealed, as a failover leaves it.
    """

    def __init__(
        self, store: BatchStore, batch: Batch, doing: str, *, may_reopen: bool = False
    ) -> None:
        self.first = self.last = batch
        self._store = store
        self._doing = doing
        self._may_reopen = may_reopen
        self._expires_at: float | None = None

    def state(self) -> Batch:
        """Return the batch as it is now.

        Raises:
            BatchChanged: if it is gone, another one, or not sealed any more.
        """
        asked_at = time.monotonic()
        batch = self._store.batch(self.first.id)
        if batch is None or batch.status == "deleting":
            raise self._gone()
        if _life(batch) != _life(self.first):
            raise BatchChanged(
                f"batch {batch.id} was deleted, and submitted anew, while {self._doing}",
                "what was read is not from one batch: begin again with the new one",
            )
        if self.last.sealed and not batch.sealed and not self._may_reopen:
            raise WritesLost(batch.id, f"batch {batch.id} is not submitted to its end any more")
        self.last = batch
        if batch.finished:
            left_s = self._store.expires_in_s(batch.id)
            self._expires_at = None if left_s is None else asked_at + left_s
        return batch

    def incomplete(self, given: int) -> BatchChanged:
        """Return the error for results that end after `given` of the batch's requests."""
        first, last = self.first, self.last
        total = last.number("total")
        if last.number("retried") != first.number("retried"):
            return BatchChanged(
                f"batch {last.id} was retried while {self._doing}: some of its requests run again",
                f"`producer results {last.id} --follow` waits for them",
            )
        if not last.finished and first.finished:
            return WritesLost(
                last.id, f"some requests of batch {last.id} run again",
                f"`producer results {last.id} --follow` waits for them",
            )  # fmt: skip
        if not last.finished:
            return BatchChanged(
                f"batch {last.id} is still {last.status}: {last.terminal} of {total} requests "
                "have ended",
                "--follow waits for the others",
            )
        if self._expired(_EXPIRY_TAKES_S):
            return self._gone(_EXPIRY_TAKES_S)
        return BatchChanged(
            f"only {given} of the {total} requests of batch {last.id} could be read: its index in "
            "Redis is not whole",
            "if nothing else removes keys there, please report it; submit the file again under "
            "another --batch-id",
        )

    def _expired(self, early_s: float = 0.0) -> bool:
        return self._expires_at is not None and time.monotonic() >= self._expires_at - early_s

    def _gone(self, early_s: float = 0.0) -> BatchChanged:
        if self._expired(early_s):
            return BatchChanged(
                f"batch {self.first.id} expired while {self._doing}",
                "submit the file again, and collect earlier or raise WARMQ_RESULT_TTL_S",
            )
        return BatchChanged(
            f"batch {self.first.id} was deleted while {self._doing}, or Redis was emptied",
            "submit the file again if you still want its results",
        )


def _life(batch: Batch) -> tuple[str | None, str | None]:
    # Another batch under the same id has another of both; of one millisecond, another `life`.
    return batch.fields.get("created_at"), batch.fields.get("life")
