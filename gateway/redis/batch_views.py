"""Batches as a gateway shows them: made over HTTP, or submitted otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from contract.batch import Batch
from contract.redis.objects import Stored
from contract.redis.reads import Reads

#: What BATCH_VIEWS tells of a part, in its order.
_PART = ("total", "completed", "failed", "cancelled", "expired", "prompt_tokens",
         "completion_tokens", "sealed", "finished_at", "created_at", "expected")  # fmt: skip
_UNKNOWN, _MORE, _AGAIN, _GO_ON = -1, 1, 2, 3


@dataclass(frozen=True, slots=True)
class BatchView:
    """One batch: a gateway's document and, while it runs, the counters of its `parts`; or a batch
    that was submitted otherwise. A part that is not there (yet, or any more) has no fields."""

    id: str
    source: Stored | Batch
    parts: list[Batch]


@dataclass(frozen=True, slots=True)
class BatchPage:
    """Batches, newest first, and whether there are more after them."""

    batches: list[BatchView]
    has_more: bool


class BatchViews(Reads):
    """Views in one Redis. Each call raises StoreUnavailable where it cannot be used."""

    def get(self, owner: str, batch_id: str) -> BatchView | None:
        """Return an owner's batch in one round trip; None if it has none of that id."""
        answer, _, *found = self._run("batch_views", owner, batch_id, "", 1, "")
        return None if answer == _UNKNOWN else _view(found[0])

    def page(self, owner: str, *, after: str = "", limit: int) -> BatchPage | None:
        """Return what comes after the batch `after` ('' : the newest).

        One round trip, and one more for each 250 batches that were submitted otherwise since
        the last page of anybody, and for each 1,000 that have expired.

        Returns:
            None if the owner has no batch of that id.
        """
        found: dict[bytes, Any] = {}
        place: int | str = ""
        while True:
            left = limit - len(found)
            answer, at, *raws = self._run("batch_views", owner, "", after, left, place)
            if answer == _UNKNOWN:
                return None
            # What was made meanwhile moves the places: one may come twice.
            found |= {raw[0]: raw for raw in raws}
            if answer == _GO_ON:
                place = at
            elif answer != _AGAIN:
                return BatchPage([_view(raw) for raw in found.values()], answer == _MORE)


def _view(raw: list[Any]) -> BatchView:
    batch_id, document, version, *states = raw
    name = batch_id.decode()
    if not document:
        pairs = zip(states[0][::2], states[0][1::2], strict=True)
        queued = Batch(name, {field.decode(): value.decode() for field, value in pairs})
        return BatchView(name, queued, [])
    parts = [
        Batch(name, {f: v.decode() for f, v in zip(_PART, state, strict=False) if v is not None})
        for state in states
    ]
    return BatchView(name, Stored(name, document, int(version)), parts)
