"""Reads an owner's batches, made over HTTP or by `producer submit`, and the order of endings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from contract.batch import Batch
from contract.redis import keys
from contract.redis.objects import Stored
from contract.redis.reads import Reads, check_protocol

#: Fields of a part, in the order of BATCH_VIEWS.
_PART = ("total", "completed", "failed", "cancelled", "expired", "prompt_tokens",
         "completion_tokens", "sealed", "finished_at", "created_at", "expected")  # fmt: skip
_UNKNOWN, _MORE, _AGAIN, _GO_ON = -1, 1, 2, 3


@dataclass(frozen=True, slots=True)
class BatchView:
    """A gateway's record and, while it runs, the counters of its parts; or a submitted batch.

    A missing part has no fields.
    """

    id: str
    source: Stored | Batch
    parts: list[Batch]


@dataclass(frozen=True, slots=True)
class BatchPage:
    """Batches, newest first, and whether more follow."""

    batches: list[BatchView]
    has_more: bool


class BatchViews(Reads):
    """Views in one Redis. Calls raise StoreUnavailable."""

    def get(self, owner: str, batch_id: str) -> BatchView | None:
        """Return an owner's batch in one round trip, or None; raise ProtocolMismatch."""
        answer, _, *found = self._run("batch_views", owner, batch_id, "", 1, "")
        if answer == _UNKNOWN:
            return None
        view = _view(found[0])
        if isinstance(view.source, Batch):
            check_protocol(view.source)
        return view

    def page(self, owner: str, *, after: str = "", limit: int) -> BatchPage | None:
        """Return the batches after one of them ('' : the newest); None if it is unknown.

        One round trip, and another for each 250 batches submitted since anybody's last page, and
        for each 1,000 that have expired.
        """
        found: dict[bytes, Any] = {}
        place: int | str = ""
        while True:
            left = limit - len(found)
            answer, at, *raws = self._run("batch_views", owner, "", after, left, place)
            if answer == _UNKNOWN:
                return None
            # A new batch moves the places of all: one may come twice.
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


@dataclass(frozen=True, slots=True)
class Segment:
    """`count` endings of a part, from its own `start` on, at position `first` of the order."""

    part: Batch
    first: int
    start: int
    count: int


class PartialOrder(Reads):
    """The order in which a batch's requests ended, over all its parts."""

    def segments(
        self, batch_id: str, parts: Sequence[Batch], position: int, ttl_ms: int
    ) -> tuple[int, list[Segment]]:
        """Return the end of the order, and its segments from a position on.

        Positions never change: the segments of several parts are stored until `ttl_ms` after the
        last call.
        """
        if len(parts) == 1:  # the order of the queue's own list, which only grows
            count = int(self._client.llen(keys.batch_key(parts[0].id, "finished")))
            return count, [Segment(parts[0], 0, 0, count)]
        names = [part.id for part in parts]
        found: dict[int, Segment] = {}
        while True:
            end, *flat = self._run("partial_order", batch_id, position, ttl_ms, *names)
            for first, p, start, n in zip(
                flat[::4], flat[1::4], flat[2::4], flat[3::4], strict=True
            ):
                found[first] = Segment(parts[p], first, start, n)
                position = max(position, first + n)
            if position >= end:
                return end, list(found.values())
