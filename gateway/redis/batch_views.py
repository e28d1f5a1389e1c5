"""Reads a tenant's batches, and the order in which the requests of a batch ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from contract.batch import Batch
from contract.redis import keys
from contract.redis.objects import Stored
from contract.redis.reads import Reads, check_protocol

#: Fields of a queue batch, in the order of BATCH_VIEWS (gateway/lua/batch_views.lua).
_PART = ("total", "completed", "failed", "cancelled", "expired", "prompt_tokens",
         "completion_tokens", "sealed", "finished_at", "created_at", "expected", "failures",
         "cut", "reason", "cached")  # fmt: skip
#: Answers of BATCH_VIEWS: the tenant has no such id; more batches follow; call again, because more
#: batches must be added to the lists first; call again with the returned place.
_UNKNOWN, _MORE, _AGAIN, _GO_ON = -1, 1, 2, 3


@dataclass(frozen=True, slots=True)
class BatchView:
    """A batch made over HTTP, with its queue batches, or a batch of `producer submit`.

    `source` is the record of a batch made over HTTP. While it runs, `parts` has its queue batches;
    a missing queue batch has no fields. A batch of `producer submit` is itself the `source`.
    """

    id: str
    source: Stored | Batch
    parts: list[Batch]


@dataclass(frozen=True, slots=True)
class BatchPage:
    """A page of batches, newest first, and whether more follow."""

    batches: list[BatchView]
    has_more: bool


class BatchViews(Reads):
    """Reads batches of tenants (`owner`, '' for all) in one Redis. Calls raise StoreUnavailable."""

    def get(self, owner: str, batch_id: str) -> BatchView | None:
        """Return a tenant's batch in one round trip, or None; raise ProtocolMismatch."""
        answer, _, *raws = self._run("batch_views", owner, batch_id, "", 1, "")
        if answer == _UNKNOWN:
            return None
        view = self._view(raws[0])
        if isinstance(view.source, Batch):
            check_protocol(view.source)
        return view

    def page(self, owner: str, *, after: str = "", limit: int) -> BatchPage | None:
        """Return the batches that follow `after` ('' for the first page); None if it is unknown.

        This takes one round trip, another for each 250 batches that were submitted since the last
        page of any tenant, and another for each 1,000 expired batches.
        """
        raw_by_id: dict[bytes, Any] = {}
        place: int | str = ""
        while True:
            left = limit - len(raw_by_id)
            answer, at, *raws = self._run("batch_views", owner, "", after, left, place)
            if answer == _UNKNOWN:
                return None
            # A batch created meanwhile shifts all places, so a batch may be returned twice.
            raw_by_id |= {raw[0]: raw for raw in raws}
            if answer == _GO_ON:
                place = at
            elif answer != _AGAIN:
                return BatchPage([self._view(raw) for raw in raw_by_id.values()], answer == _MORE)

    def _view(self, raw: list[Any]) -> BatchView:
        batch_id, document, version, *states = raw
        name = batch_id.decode()
        if not document:
            pairs = zip(states[0][::2], states[0][1::2], strict=True)
            queued = Batch(name, {field.decode(): value.decode() for field, value in pairs})
            return BatchView(name, self.with_windows(queued), [])
        parts = [
            Batch(
                name, {f: v.decode() for f, v in zip(_PART, state, strict=False) if v is not None}
            )
            for state in states
        ]
        return BatchView(name, Stored(name, document, int(version)), parts)


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive endings of one queue batch within the order of the whole batch.

    They are `count` entries of its finished list, from index `start`; the first of them has the
    position `first` in the order.
    """

    part: Batch
    first: int
    start: int
    count: int


class PartialOrder(Reads):
    """Reads the order in which a batch's requests ended, over all its queue batches."""

    def segments(
        self, batch_id: str, parts: Sequence[Batch], position: int, ttl_ms: int
    ) -> tuple[int, list[Segment]]:
        """Return the end of the order, and its segments from a position on.

        Positions never change: the segments of several queue batches are stored until `ttl_ms`
        after the last call.
        """
        if len(parts) == 1:  # its finished list, which only grows, has the order
            count = int(self._client.llen(keys.batch_key(parts[0].id, "finished")))
            return count, [Segment(parts[0], 0, 0, count)]
        names = [part.id for part in parts]
        segments: dict[int, Segment] = {}
        while True:
            end, *flat = self._run("partial_order", batch_id, position, ttl_ms, *names)
            for first, index, start, count in zip(
                flat[::4], flat[1::4], flat[2::4], flat[3::4], strict=True
            ):
                segments[first] = Segment(parts[index], first, start, count)
                position = max(position, first + count)
            if position >= end:
                return end, list(segments.values())
