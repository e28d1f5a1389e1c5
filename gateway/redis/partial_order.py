"""The order in which the requests of a batch ended, over all its parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from contract.batch import Batch
from contract.redis import keys
from contract.redis.reads import Reads


@dataclass(frozen=True, slots=True)
class Segment:
    """Endings of one part: `count` of them, from its own `start` on, at position `first` of all."""

    part: Batch
    first: int
    start: int
    count: int


class PartialOrder(Reads):
    """Orders in one Redis. Each call raises StoreUnavailable where it cannot be used."""

    def segments(
        self, batch_id: str, parts: Sequence[Batch], position: int, ttl_ms: int
    ) -> tuple[int, list[Segment]]:
        """Return where the order ends now, and the segments that hold what is from a position on.

        A position means the same in every call. Each call may add a segment for each part, so that
        of several parts something is kept, for `ttl_ms` after the last call.
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
